"""Method names: parsed in one place, listed completely, refused helpfully; the command line around them."""

import json
import re
import subprocess
import sys

import pytest
import torch

from dape import (
    POSITIONS,
    SCORES,
    Method,
    ScoreProcessor,
    ScoreProgram,
    Stage,
    all_methods,
    parse_method,
    register_position,
    register_scores,
)
from dape.cli import main
from dape.methods import canonical, parse_layers
from dape.models import DapeConfig, DapeForCausalLM


class Sharp(ScoreProcessor):
    """Stands for a processor that somebody adds: q·k times a factor."""

    summary = "sharper scores"

    def __init__(self, num_heads: int, factor: float = 3.0) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(num_heads, num_heads, bias=False)
        torch.nn.init.eye_(self.mix.weight)
        self.factor = factor

    def program(self) -> ScoreProgram:
        return ScoreProgram((Stage(self.mix.weight[:, :, None, None] * self.factor),), residual="bias")


def test_a_registered_processor_is_a_method_everywhere(monkeypatch, capsys):
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(ValueError, match='unknown method "sharp-kerple"'):
        parse_method("sharp-kerple")
    monkeypatch.delitem(SCORES, "sharp", raising=False)
    register_scores("sharp", Sharp)
    method = parse_method("sharp-kerple-power")
    assert (method.name, method.position) == ("sharp-kerple-power", "kerple-power")
    assert method.summary.startswith("sharper scores; ")
    ids, logits, weights = torch.arange(10)[None], [], []
    for name in ("kerple", "sharp-kerple", "sharp-kerple[factor=1.0]"):
        torch.manual_seed(0)
        model = DapeForCausalLM(DapeConfig(method=name, initializer_range=1.0, **sizes))
        if name == "kerple":
            weights_of_all = model.state_dict()
        else:
            model.load_state_dict(weights_of_all, strict=False)
            assert torch.equal(model.model.layers[0].attention.scores.mix.weight, torch.eye(2))
        shown = model(ids, output_attentions=True)
        logits.append(shown.logits)
        weights.append(shown.attentions[0])
    # What is shown changes as the output does.
    for found in (logits, weights):
        assert not torch.allclose(found[0], found[1])
        torch.testing.assert_close(found[0], found[2])
    assert main(["methods"]) == 0
    assert "sharp-" in capsys.readouterr().out
    SCORES.pop("sharp")


def test_registering_refuses_what_would_not_work():
    with pytest.raises(ValueError, match='there is already a "dape": ScoreConv'):
        register_scores("dape", Sharp)
    with pytest.raises(ValueError, match="letters a to z"):
        register_scores("my-own", Sharp)
    with pytest.raises(TypeError, match="is not a subclass of ScoreProcessor"):
        register_scores("mine", torch.nn.Linear)
    with pytest.raises(TypeError, match="is not a subclass of PositionEncoding"):
        register_position("mine", Sharp)
    with pytest.raises(TypeError, match=r"Own defines attend\(\), which nothing would call"):
        type("Own", (ScoreProcessor,), {"attend": lambda self, q, k, v: v})


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("kerple", Method("kerple")),
        ("dape-kerple", Method("kerple", "dape", (1, 1))),
        ("dape1x1-kerple", Method("kerple", "dape", (1, 1))),
        ("dape1x3-kerple", Method("kerple", "dape", (1, 3))),
        ("dape1x12-rope", Method("rope", "dape", (1, 12))),
        ("dape1x2-kerple-power", Method("kerple-power", "dape", (1, 2))),
        ("dape3x3-kerple", Method("kerple", "dape", (3, 3))),
        ("dape2x1-fire", Method("fire", "dape", (2, 1))),
        ("talking-alibi", Method("alibi", "talking")),
        ("mta-rope", Method("rope", "mta", (6, 11))),
        ("mta3x5-fox", Method("fox", "mta", (3, 5))),
        ("keyconv1x3-transformer-xl", Method("transformer-xl", "keyconv", (1, 3))),
        ("rope[scaling=linear,factor=8]", Method("rope", options=(("factor", 8), ("scaling", "linear")))),
        ("dape1x3-kerple[depth=3]", Method("kerple", "dape", (1, 3), (("depth", 3),))),
        ("kerple[normaliser=ssmax]", Method("kerple", options=(("normaliser", "ssmax"),))),
        (
            "dape1x3-kerple[bias_channels=false,negative_slope=0.5]",
            Method("kerple", "dape", (1, 3), (("bias_channels", False), ("negative_slope", 0.5))),
        ),
    ],
)
def test_names_parse(name, method):
    assert parse_method(name) == method
    assert parse_method(method.name) == method


def test_names_of_layers_are_those_of_their_papers():
    window = "rope[base=1000000.0,window=64]"
    assert canonical("swan[window=64]") == f"nope[length=512,normaliser=logn]/{window}/{window}/{window}"
    assert canonical("rnope-swa").count("rope[window=4096]") == 3
    assert canonical(["swan", "kerple"]).endswith("window=512]/kerple")
    for name, count in (("swan", 4), ("rope[window=9]/nope", 2)):
        with pytest.raises(ValueError, match=rf'"{re.escape(name)}" names the methods of {count} layers'):
            parse_method(name)
    with pytest.raises(ValueError, match='"nope" has no option depth'):
        parse_layers("swan[depth=3]")
    assert canonical("stickbreaking") == "nope[normaliser=stickbreaking]"
    assert parse_method("stickbreaking[window=9]").name == "nope[normaliser=stickbreaking,window=9]"


def test_layers_are_written_with_a_slash():
    methods = parse_layers("rope[scaling=linear,factor=2]/nope")
    assert methods == parse_layers(["rope[factor=2,scaling=linear]", "nope"])
    assert canonical(["rope", "dape1x1-nope"]) == "rope/dape-nope"
    assert [m.window for m in parse_layers("rope[window=512]/nope[normaliser=ssmax]")] == [512, None]
    with pytest.raises(ValueError, match="window=0: a query sees at least its own key"):
        parse_method("kerple[window=0]")


def test_every_listed_name_parses_to_itself_and_builds():
    for method in all_methods():
        assert parse_method(method.name) == method
        program = method.build_scores(4).program()
        program.check(4, has_bias=POSITIONS[method.position].additive)
        if method.processor == "dape":
            channels = 8 if POSITIONS[method.position].additive else 4
            assert program.pre[0].weight.shape == (32, channels, *method.kernel)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("dape1x3-kerpel", "dape1x3-kerple"), ("Rope", "rope"), ("alibbi", "alibi"),
        ("dape1x0-fire", "dape1x3-fire"), ("dape-", "dape"), ("talking1x3-rope", "talking-rope"),
        ("plain-rope", "rope")
    ],
)  # fmt: skip
def test_an_unknown_name_gets_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f'unknown method "{name}"; did you mean .*{nearest}'):
        parse_method(name)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("rope[depth=3]", '"rope" has no option depth; it has .*scaling'),
        ("dape1x3-rope[scale=3]", '"dape1x3-rope" has no option scale; it has .*scaling.*depth'),
        ("rope[scaling]", '"scaling" in .* is not an option: write name=value'),
        ("rope[]x", "unknown method"),
    ],
)
def test_options_that_do_not_exist_are_refused(name, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_method(name)


@pytest.mark.parametrize("arguments", [[], ["methods"]])
def test_a_reader_that_has_enough_ends_it_quietly(arguments):
    command = [sys.executable, "-m", "dape", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_dape_methods_lists_them_all_on_one_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["methods", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert {record["name"] for record in records} == {method.name for method in all_methods()}
    assert all(record["summary"] for record in records)
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    shown = {word.rstrip(",") for line in lines for word in line.split()}
    # Of a processor with several kernels, the first two stand for all.
    assert shown >= {*POSITIONS, "dape-", "dape1x3-", "keyconv1x3-", "talking-", "mta-"}
    assert {m.processor for m in all_methods()} == set(SCORES)
