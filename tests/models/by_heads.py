"""What torchrun starts for test_context: heads shared out between processes against all heads in one."""

import sys

import pytest
import torch
import torch.distributed as dist

import dape
from dape.methods import parse_method
from dape.models import DapeConfig, DapeForCausalLM
from dape.models.parallel import (
    SharedAttention,
    bias_of_heads,
    program_of_heads,
    share_heads,
    sum_shared_gradients,
)
from dape.positions import Positions

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
HEADS, WIDTH, TOKENS, HIDDEN = 4, 8, 20, 32


class Layer:
    """Attention of which any share of the heads can be computed: columns of q, k, v, rows of the output projection."""

    def __init__(self, name):
        method = parse_method(name)
        self.scores = method.build_scores(HEADS, width=8).double()
        self.encoding = method.build_position(num_heads=HEADS, head_dim=WIDTH, hidden_size=HIDDEN).double()
        self.qkv, self.project = (
            torch.randn(3, HIDDEN, HIDDEN).double() / 6,
            torch.randn(HIDDEN, HIDDEN).double(),
        )
        self.learned = [*self.scores.parameters(), *self.encoding.parameters()]

    def __call__(self, x, part, parts):
        own = slice(part * HIDDEN // parts, (part + 1) * HIDDEN // parts)
        heads = (x @ weight[:, own] for weight in self.qkv)
        q, k, v = (y.unflatten(-1, (HEADS // parts, WIDTH)).transpose(1, 2) for y in heads)
        positions = Positions.of(TOKENS)
        q, k = self.encoding.rotate(q, positions.queries), self.encoding.rotate(k, positions.keys)
        state = self.encoding.token_state(x)
        further = {} if state is None else {"state": state}
        # Encodings give the bias of all heads.
        all_heads = (y.repeat(1, parts, 1, 1) for y in (q, k))
        bias = self.encoding.bias(*all_heads, positions, scale=WIDTH**-0.5, **further)
        program = program_of_heads(self.scores.program(), part, parts)
        attended = dape.attention(q, k, v, program, bias=bias_of_heads(bias, part, parts), scale=WIDTH**-0.5)
        return attended.transpose(1, 2).flatten(2) @ self.project[own]


for name in sys.argv[1:]:
    torch.manual_seed(0)
    layer = Layer(name)
    x = torch.randn(2, TOKENS, HIDDEN).double().requires_grad_()
    weight = torch.randn(2, TOKENS, HIDDEN).double()
    whole, own = layer(x, 0, 1), layer(x, rank, world)
    expected, found = (
        torch.autograd.grad((out * weight).sum(), [x, *layer.learned], allow_unused=True)
        for out in (whole, own)
    )
    total = own.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, whole.detach())
    for part, complete in zip(found, expected, strict=True):
        if complete is not None:
            mine = torch.zeros_like(complete) if part is None else part.clone()
            dist.all_reduce(mine)
            torch.testing.assert_close(mine, complete)
# A whole model: logits, loss and gradients are those of one process.
ids = torch.randint(0, 50, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def built(name, **options):
    torch.manual_seed(1)
    sizes = {"vocab_size": 50, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    config = DapeConfig(method=name, num_key_value_heads=2, score_width=8, **sizes, **options)
    return DapeForCausalLM(config).double()


class Learned(dape.PositionEncoding):
    """Learned absolute positions: added to the embeddings, before heads are shared out."""

    def __init__(self, hidden_size):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(TOKENS + 8, hidden_size))

    def embed(self, x, positions):
        return x + self.table[positions]


class LearnedWithBias(Learned):
    def bias(self, q, k, positions, **_):
        return None


dape.register_position("learned", Learned)
dape.register_position("learned-with-bias", LearnedWithBias)

for name in [*sys.argv[1:], "dape1x3-cope[groups=2]", "relative", "learned"]:
    whole, shared = (built(name, head_norm=True, head_gate=True) for _ in range(2))
    share_heads(shared)
    assert sum(p.numel() for p in shared.model.layers.parameters()) < 0.7 * sum(
        p.numel() for p in whole.model.layers.parameters()
    )
    for model in (whole, shared):
        model.output = model(ids, labels=ids)
        model.output.loss.backward()
    sum_shared_gradients(shared)
    torch.testing.assert_close(shared.output.logits, whole.output.logits)
    torch.testing.assert_close(shared.output.loss, whole.output.loss)
    expected = dict(whole.named_parameters())
    for key, value in shared.named_parameters():
        complete = expected[key.replace(".rows.", ".")].grad
        if complete is None:
            assert value.grad is None or not value.grad.any(), (name, key)
            continue
        for dim, size in enumerate(complete.shape):
            if size != value.shape[dim]:
                complete = complete.chunk(world, dim)[rank]
        torch.testing.assert_close(value.grad, complete, msg=lambda s, k=key, n=name: f"{n}, {k}: {s}")
    given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(shared.eval().generate(ids, **given), whole.eval().generate(ids, **given))
for name, options, sentence in (
    ("dape1x3-kerple", {}, "mixes heads of different processes"),
    ("kerple", {"num_key_value_heads": 1}, "num_key_value_heads=1 does not divide evenly across 2 ranks"),
    ("kerple", {"intermediate_size": 63}, "intermediate_size=63 does not divide"),
    ("learned-with-bias", {}, "LearnedWithBias has parameters, embeds tokens and changes heads"),
):
    config = DapeConfig(
        method=name, vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, **options
    )
    model = DapeForCausalLM(config)
    with pytest.raises(ValueError, match=sentence):
        share_heads(model)
    assert not isinstance(model.model.layers[0].attention, SharedAttention)
    model(ids)
print("shared heads and all heads are the same", flush=True)
dist.destroy_process_group()
