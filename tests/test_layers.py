"""The layer for anybody's model: what it computes is the same in one pass, in steps, in a batch and in a row of documents."""

import pytest
import torch
import transformers

import dape

HEADS, GROUPS, WIDTH, TOKENS = 4, 2, 8, 11
METHODS = [
    "dape1x3-kerple", "rope", "dape1x3-rope", "kerple", "t5", "mta-alibi", "dape3x3-fire", "dape1x3-fox",
    "nope"
]  # fmt: skip


def build(method, **options):
    torch.manual_seed(0)
    layer = dape.ScoreAttention(method, num_heads=HEADS, head_dim=WIDTH, width=8, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.rand_like(parameter))
    return layer


def inputs(tokens=TOKENS, batch=2):
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, heads, tokens, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return q, k, v, torch.randn(batch, tokens, HEADS * WIDTH, dtype=torch.float64, generator=generator)


def call(layer, q, k, v, x, rows=slice(None), **options):
    q, k, v = (y[:, :, rows] for y in (q, k, v))
    return layer(q, k, v, hidden=x[:, rows] if layer.reads_hidden else None, **options)


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def caches():
    config = dape.models.DapeConfig(num_hidden_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS)
    theirs = transformers.DynamicCache(config=config), transformers.StaticCache(config, max_cache_len=16)
    return [dape.Cache(), *theirs]


def test_it_is_the_op_with_encoding_and_processor():
    layer, (q, k, v, _) = build("dape1x3-kerple"), inputs()
    bias = layer.encoding.bias(q, k, dape.Positions.of(TOKENS), scale=WIDTH**-0.5)
    whole = layer(q, k, v)
    same(whole, dape.attention(q, k, v, layer.scores, bias=bias))
    same(layer(q[:, :, -2:], k, v), whole[:, :, -2:])
    same(layer.weights(q, k) @ v.repeat_interleave(HEADS // GROUPS, 1), whole)
    plain = build("nope", scale=0.3)
    for causal in (True, False):
        how = {"is_causal": causal, "scale": 0.3, "enable_gqa": True}
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, **how)
        same(plain(q, k, v, is_causal=causal), expected)


@pytest.mark.parametrize("method", METHODS)
def test_steps_chunks_padding_and_documents_change_nothing(method):
    layer, given = build(method), inputs()
    whole = call(layer, *given)
    for kind in range(3):
        for chunks in ([TOKENS - 1, 1], [4, 1, 1, 5]):
            if kind:
                layer.layer = 0
            cache, out, start = caches()[kind], [], 0
            for size in chunks:
                out.append(call(layer, *given, rows=slice(start, start + size), cache=cache))
                start += size
            same(torch.cat(out, 2), whole)
    layer.layer = None
    q, k, v, x = given
    padded = [torch.cat([y[:, :, :3] + 1, y], 2) for y in (q, k, v)] + [torch.cat([x[:, :3] + 1, x], 1)]
    mask = torch.ones(2, TOKENS + 3, dtype=torch.long)
    mask[:, :3] = 0
    for form in (mask, mask.bool(), mask[:, None, None].bool()):
        same(call(layer, *padded, mask=form)[:, :, 3:], whole)
    packed = [torch.cat([y, y[:, :, :5]], 2) for y in (q, k, v)] + [torch.cat([x, x[:, :5]], 1)]
    starts_again = torch.cat([torch.arange(TOKENS), torch.arange(5)])
    out = call(layer, *packed, positions=starts_again)
    same(out[:, :, :TOKENS], whole)
    same(out[:, :, TOKENS:], whole[:, :, :5])


@pytest.mark.parametrize("method", METHODS)
def test_a_window_is_the_same_in_steps(method):
    layer, given = build(method, window=4), inputs()
    whole, cache = call(layer, *given), dape.Cache()
    assert not torch.allclose(whole, call(build(method), *given))
    steps = [call(layer, *given, rows=slice(t, t + 1), cache=cache) for t in range(TOKENS)]
    same(torch.cat(steps, 2), whole)


@pytest.mark.parametrize("method", [m for m in METHODS if not m.endswith(("fox", "alibi", "fire"))])
def test_where_the_future_is_visible_padding_changes_nothing(method):
    layer, given = build(method), inputs()
    whole = layer(*given[:3], is_causal=False)
    q, k, v = (torch.cat([y[:, :, :2] + 1, y, y[:, :, :3]], 2) for y in given[:3])
    mask = torch.ones(2, TOKENS + 5, dtype=torch.bool)
    mask[:, :2] = mask[:, -3:] = False
    same(layer(q, k, v, mask=mask, is_causal=False)[:, :, 2:-3], whole)
    by_query = (mask[:, :, None] & mask[:, None]) | torch.eye(TOKENS + 5, dtype=torch.bool)
    if method in ("nope", "rope", "dape1x3-rope", "kerple", "dape1x3-kerple", "t5"):
        found = layer(q, k, v, mask=by_query[:, None], is_causal=False)[:, :, 2:-3]
        same(found, whole)


def test_padding_between_tokens_is_left_out_when_a_conversation_goes_on():
    layer, (q, k, v, _) = build("dape1x3-kerple"), inputs()
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, 4:7] = 0
    real = mask[0].bool()
    alone = layer(*(y[:1, :, real] for y in (q, k, v)))
    same(layer(q, k, v, mask=mask)[:1, :, real], alone)
    cache = dape.Cache()
    first = layer(*(y[:, :, :7] for y in (q, k, v)), mask=mask[:, :7], cache=cache)
    then = layer(*(y[:, :, 7:] for y in (q, k, v)), mask=mask, cache=cache)
    same(torch.cat([first, then], 2)[:1, :, real], alone)


def test_layers_share_one_cache():
    layers, (q, k, v, _) = [build("kerple"), build("dape1x3-kerple")], inputs()
    cache = dape.Cache()
    for rows in (slice(0, 6), slice(6, None)):
        found = [layer(*(y[:, :, rows] for y in (q, k, v)), cache=cache) for layer in layers]
    for layer, last in zip(layers, found, strict=True):
        same(last, layer(q, k, v)[:, :, 6:])


def test_it_trains_compiles_and_saves(tmp_path):
    layer, (q, k, v, _) = build("dape1x3-kerple"), inputs()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    same(compiled(q, k, v), layer(q, k, v))
    layer(q, k, v).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = dape.ScoreAttention("dape1x3-kerple", num_heads=HEADS, head_dim=WIDTH, width=8).double()
    other.load_state_dict(torch.load(tmp_path / "layer.pt"))
    same(other(q, k, v), layer(q, k, v))
    assert '"dape1x3-kerple", num_heads=4, head_dim=8' in repr(layer)


def wrong(method="dape1x3-kerple", q=None, **options):
    given = inputs()
    layer = build(method)
    return lambda: layer(given[0] if q is None else given[0][q], *given[1:3], **options)


REFUSED = {
    "sinusoidal": (lambda: build("dape1x3-sinusoidal"), r'added to token embeddings.*build this layer with "dape1x3-nope"'),
    "heads": (wrong(q=(slice(None), slice(2))), r"q has shape \(2, 2, 11, 8\), expected \[batch, 4 heads, tokens, 8\]"),
    "fox": (wrong("fox"), "fox reads the layer's input, which was not given: pass hidden=x"),
    "earlier": (wrong("mta-alibi", q=(slice(None), slice(None), slice(-1, None))), "reads 5 earlier queries, but q has 1"),
    "window": (lambda: build("kerple", window=0), "window=0"),
    "backward": (wrong("fox", is_causal=False, hidden=torch.zeros(2, TOKENS, 32).double()), "no meaning where the future"),
    "both": (wrong(is_causal=False, cache=dape.Cache()), "a cache is for causal attention"),
    "cross": (wrong(is_causal=False, q=(slice(None), slice(None), slice(2))), "q has 2 tokens and k 11"),
    "numbers": (wrong(mask=torch.full((2, 1, TOKENS, TOKENS), 0.5)), "pass offsets of the scores as a bias"),
    "cache": (wrong(cache=caches()[1]), r"build ScoreAttention\(…, layer=n\)"),
    "short mask": (wrong(mask=torch.ones(2, 5, dtype=torch.long)), "covers 5 tokens, but there are 11"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_misuse_is_a_sentence(case):
    action, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        action()
