"""What two processes run for test_context: models whose tokens or heads two processes share, against the models whole."""

import pytest
import torch
import torch.distributed as dist
from builders import decoder
from test_context import HEADS, TOKENS

import dape
from dape.models.parallel import SharedAttention, Shares, share_heads, sum_shared_gradients

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
LENGTH = 24
ids = torch.randint(1, 40, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def built(method, **options):
    return decoder(method, num_key_value_heads=2, **options).double().train()


def same(found, expected, *about):
    assert (found is None) == (expected is None), about
    if found is not None:
        torch.testing.assert_close(found, expected, msg=lambda text: f"{about}: {text}")


# The processes' losses and gradients add up to those of one.
labels = ids.clone()
labels[0, :5] = -100
for name in TOKENS:
    model, shares = built(name), Shares(LENGTH)
    whole = model(ids, labels=labels)
    whole.loss.backward()
    expected = {key: value.grad for key, value in model.named_parameters()}
    model.zero_grad()
    own = model(ids, labels=labels, shares=shares)
    same(own.logits, shares.part(whole.logits, 1), name)
    own.loss.backward()
    total = own.loss.detach().clone()
    dist.all_reduce(total)
    same(total, whole.loss.detach(), name)
    for key, value in model.named_parameters():
        if value.grad is not None:
            dist.all_reduce(value.grad)
        same(value.grad, expected[key], name, key)
for argument in ({"attention_mask": torch.ones_like(ids)}, {"use_cache": True}, {"output_attentions": True}):
    with pytest.raises(ValueError, match=f"{next(iter(argument))} cannot be used with shares"):
        model(ids, shares=shares, **argument)
with pytest.raises(ValueError, match="shares are of 24 tokens, the input has 12"):
    model(ids[:, :12], shares=shares)
with pytest.raises(ValueError, match="multiple of 4"):
    Shares(LENGTH + 2)
assert Shares(8).part(torch.arange(8), 0).tolist() == ([0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5])


class Learned(dape.PositionEncoding):
    """Learned absolute positions: added to the embeddings, before heads are shared out."""

    def __init__(self, hidden_size):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(LENGTH + 8, hidden_size))

    def embed(self, x, positions):
        return x + self.table[positions]


class LearnedWithBias(Learned):
    def bias(self, q, k, positions, **_):
        return None


dape.register_position("learned", Learned)
dape.register_position("learned-with-bias", LearnedWithBias)

for name in [*HEADS, "dape1x3-cope[groups=2]", "relative", "learned"]:
    whole, shared = (built(name, head_norm=True, head_gate=True) for _ in range(2))
    share_heads(shared)
    sizes = [sum(p.numel() for p in model.model.layers.parameters()) for model in (shared, whole)]
    assert sizes[0] < 0.7 * sizes[1]
    for model in (whole, shared):
        model.output = model(ids, labels=ids)
        model.output.loss.backward()
    sum_shared_gradients(shared)
    same(shared.output.logits, whole.output.logits, name)
    same(shared.output.loss, whole.output.loss, name)
    expected = dict(whole.named_parameters())
    for key, value in shared.named_parameters():
        complete = expected[key.replace(".rows.", ".")].grad
        if complete is None:
            assert value.grad is None or not value.grad.any(), (name, key)
            continue
        for dim, size in enumerate(complete.shape):
            if size != value.shape[dim]:
                complete = complete.chunk(world, dim)[rank]
        same(value.grad, complete, name, key)
    given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(shared.eval().generate(ids, **given), whole.eval().generate(ids, **given))
for name, options, sentence in (
    ("dape1x3-kerple", {}, "mixes heads of different processes"),
    ("kerple", {"num_key_value_heads": 1}, "num_key_value_heads=1 does not divide evenly across 2 ranks"),
    ("kerple", {"intermediate_size": 63}, "intermediate_size=63 does not divide"),
    ("learned-with-bias", {}, "LearnedWithBias has parameters, embeds tokens and changes heads"),
):
    model = decoder(name, num_hidden_layers=1, **options)
    with pytest.raises(ValueError, match=sentence):
        share_heads(model)
    assert not isinstance(model.model.layers[0].attention, SharedAttention)
    model(ids)
print("in parts and whole are the same", flush=True)
dist.destroy_process_group()
