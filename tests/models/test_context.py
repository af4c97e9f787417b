"""Context and tensor parallelism on two processes equal one: every kind of bias and program."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from processes import copies

import dape
from dape.models.parallel import program_of_heads
from dape.ops.score_attention import ScoreProgram, Stage

# Methods whose tokens, and those whose heads, are shared out.
TOKENS = [
    "dape1x3-kerple", "kerple", "dape1x3-rope", "rope[scaling=dynamic,factor=2,original_length=8]",
    "dape1x3-fox", "selective-rope[bias=true]", "dape3x3-kerple", "mta-rope", "talking-alibi",
    "dape1x3-fire", "dape1x3-nope", "dape1x3-cope"
]  # fmt: skip


HEADS = [
    "kerple", "dape1x3-kerple[groups=2,width=8]", "dape1x3-fox[groups=4,width=8]",
    "selective-rope[bias=true]", "pope", "keyconv1x3-rope", "mta-kerple", "alibi[normaliser=sink]",
    "kerple[normaliser=ssmax,zero_init=true]"
]  # fmt: skip


def test_tokens_and_heads_shared_out_between_two_processes():
    said = copies(Path(__file__).with_name("in_parts.py"), world=2)
    assert said.count("in parts and whole are the same") == 2


def test_every_tensor_of_a_program_is_shared_out():
    names = [field.name for field in fields(ScoreProgram) if field.type == "Tensor | None"]
    vectors = dict.fromkeys(names, torch.arange(4.0))
    stage = Stage(torch.randn(4, 2, 1, 3), torch.randn(4), left=2, groups=2)
    program = ScoreProgram(pre=(stage,), post=(stage,), residual="bias", **vectors)
    assert {*vectors, "pre.0.offset"} <= dict(program.tensors()).keys()
    for part in (0, 1):
        own = program_of_heads(program, part, 2)
        assert [stage.groups for stage in (*own.pre, *own.post)] == [1, 1]
        torch.testing.assert_close(
            dict(own.tensors()), {name: tensor.chunk(2)[part] for name, tensor in program.tensors()}
        )


def test_heads_that_mix_across_processes_are_refused():
    with pytest.raises(ValueError, match=r"mixes heads of different processes.*groups=2"):
        program_of_heads(dape.ScoreConv(4).program(), 0, 2)
    with pytest.raises(ValueError, match="not one of 2 parts"):
        program_of_heads(dape.ScoreConv(4, groups=2).program(), 2, 2)
