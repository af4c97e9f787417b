"""What torchrun starts for test_context: attention by parts against attention whole, outputs and gradients."""

import sys

import pytest
import torch
import torch.distributed as dist

import dape
from dape.methods import parse_method
from dape.models import DapeConfig, DapeForCausalLM
from dape.models.parallel import Shares, context_attention
from dape.positions import Positions

dist.init_process_group("gloo")
HEADS, GROUPS, WIDTH, TOKENS, HIDDEN = 4, 2, 8, 24, 16

for name in sys.argv[1:]:
    torch.manual_seed(0)
    method = parse_method(name)
    scores = method.build_scores(HEADS, width=8).double()
    encoding = method.build_position(num_heads=HEADS, head_dim=WIDTH, hidden_size=HIDDEN).double()
    q = torch.randn(2, HEADS, TOKENS, WIDTH).double().requires_grad_()
    k, v = (torch.randn(2, GROUPS, TOKENS, WIDTH).double().requires_grad_() for _ in range(2))
    x = torch.randn(2, TOKENS, HIDDEN).double().requires_grad_()
    weight = torch.randn(2, HEADS, TOKENS, WIDTH).double()
    learned = [*scores.parameters(), *encoding.parameters()]

    positions = Positions.of(TOKENS)
    state = encoding.token_state(x)
    turned = encoding.rotate(q, positions.queries), encoding.rotate(k, positions.keys)
    further = {} if state is None else {"state": state}
    bias = encoding.bias(*turned, positions, scale=WIDTH**-0.5, **further)
    whole = dape.attention(*turned, v, scores, bias=bias)
    wanted = [q, k, v, x, *learned]
    expected = torch.autograd.grad((whole * weight).sum(), wanted, allow_unused=True)

    shares = Shares(TOKENS)
    mine = [shares.part(value.detach(), 2).requires_grad_() for value in (q, k, v)]
    own = shares.part(x.detach(), 1).requires_grad_()
    out = context_attention(*mine, scores, shares=shares, encoding=encoding, state=encoding.token_state(own))
    torch.testing.assert_close(out, shares.part(whole, 2))
    found = torch.autograd.grad(
        (out * shares.part(weight, 2)).sum(), [*mine, own, *learned], allow_unused=True
    )
    for number, (part, complete) in enumerate(zip(found, expected, strict=True)):
        assert (part is None) == (complete is None), (name, number)
        if part is None:
            continue
        if number < 3:
            complete = shares.part(complete, 2)
        elif number == 3:
            complete = shares.part(complete, 1)
        else:
            dist.all_reduce(part)
        torch.testing.assert_close(part, complete, msg=lambda text, n=number, m=name: f"{m}, {n}: {text}")

# A whole model: the processes' losses and gradients add up to those of one.
ids = torch.randint(0, 50, (2, TOKENS), generator=torch.Generator().manual_seed(0))
labels = ids.clone()
labels[0, :5] = -100
for name in sys.argv[1:]:
    torch.manual_seed(1)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    config = DapeConfig(method=name, num_key_value_heads=GROUPS, score_width=8, **sizes)
    model = DapeForCausalLM(config).double().train()
    shares = Shares(TOKENS)
    whole = model(ids, labels=labels)
    whole.loss.backward()
    expected = {key: value.grad for key, value in model.named_parameters()}
    model.zero_grad()
    own = model(ids, labels=labels, shares=shares)
    torch.testing.assert_close(own.logits, shares.part(whole.logits, 1))
    own.loss.backward()
    total = own.loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, whole.loss.detach())
    for key, value in model.named_parameters():
        assert (value.grad is None) == (expected[key] is None), (name, key)
        if value.grad is not None:
            dist.all_reduce(value.grad)
            torch.testing.assert_close(
                value.grad, expected[key], msg=lambda s, k=key, n=name: f"{n}, {k}: {s}"
            )
for argument in ({"attention_mask": torch.ones_like(ids)}, {"use_cache": True}, {"output_attentions": True}):
    with pytest.raises(ValueError, match=f"{next(iter(argument))} cannot be used with shares"):
        model(ids, shares=shares, **argument)
with pytest.raises(ValueError, match="shares are of 24 tokens, the input has 12"):
    model(ids[:, :12], shares=shares)

with pytest.raises(ValueError, match="multiple of 4"):
    Shares(TOKENS + 2)
assert Shares(8).part(torch.arange(8), 0).tolist() == ([0, 1, 6, 7] if dist.get_rank() == 0 else [2, 3, 4, 5])
print("in parts and whole are the same", flush=True)
dist.destroy_process_group()
