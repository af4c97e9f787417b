"""Method names: parsed in one place, listed completely, refused helpfully; the command line around them."""

import json
import subprocess
import sys

import pytest
import torch

from dape import POSITIONS, SCORES, Method, PlainScores, ScoreConv, all_methods, parse_method
from dape.cli import COMMANDS, main


class Sharp(PlainScores):
    """Stands for a processor that somebody adds: q·k three times as large."""

    summary = "sharper scores"

    def __init__(self, num_heads: int, factor: float = 3.0) -> None:
        super().__init__()
        self.factor = factor

    def attend(self, q, k, v, **options):
        return super().attend(q * self.factor, k, v, **options)


def test_a_processor_in_the_registry_is_a_method(monkeypatch):
    pytest.importorskip("transformers")
    from dape.models import DapeConfig, DapeForCausalLM

    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(ValueError, match='unknown method "sharp-kerple"'):
        parse_method("sharp-kerple")
    monkeypatch.setitem(SCORES, "sharp", Sharp)
    method = parse_method("sharp-kerple-power")
    assert (method.name, method.position) == ("sharp-kerple-power", "kerple-power")
    assert method.summary.startswith("sharper scores; ")
    ids = torch.arange(10)[None]
    logits = []
    for name, options in (("kerple", {}), ("sharp-kerple", {}), ("sharp-kerple", {"factor": 1.0})):
        torch.manual_seed(0)
        model = DapeForCausalLM(
            DapeConfig(method=name, score_options=options, initializer_range=1.0, **sizes)
        )
        logits.append(model(ids).logits)
    assert not torch.allclose(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("kerple", Method("kerple")),
        ("dape-kerple", Method("kerple", 1)),
        ("dape1x1-kerple", Method("kerple", 1)),
        ("dape1x3-kerple", Method("kerple", 3)),
        ("dape1x7-fire", Method("fire", 7)),
        ("dape1x12-rope", Method("rope", 12)),
        ("dape1x2-kerple-power", Method("kerple-power", 2)),
        ("dape1x3-nope", Method("nope", 3)),
        ("dape3x3-kerple", Method("kerple", 3, 3)),
        ("dape2x1-fire", Method("fire", 1, 2)),
    ],
)
def test_names_parse(name, method):
    assert parse_method(name) == method
    assert parse_method(method.name) == method


def test_every_listed_name_parses_to_itself_and_builds():
    for method in all_methods():
        assert parse_method(method.name) == method
        scores = method.build_scores(4)
        if method.kernel_size is None:
            assert isinstance(scores, PlainScores)
        else:
            assert isinstance(scores, ScoreConv)
            channels = 8 if POSITIONS[method.position].additive else 4
            assert scores.expand.weight.shape == (32, channels, 1, method.kernel_size)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("dape1x3-kerpel", "dape1x3-kerple"),
        ("Rope", "rope"),
        ("alibbi", "alibi"),
        ("dape1x0-fire", "dape1x3-fire"),
        ("dape-", "dape"),
    ],
)
def test_an_unknown_name_gets_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f'unknown method "{name}"; did you mean .*{nearest}'):
        parse_method(name)


@pytest.mark.parametrize("arguments", [[], ["methods"]])
def test_a_reader_that_has_enough_ends_it_quietly(arguments):
    command = [sys.executable, "-m", "dape", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_options_of_plain_scores_are_refused():
    with pytest.raises(ValueError, match='"kerple" leaves scores as they are; it has no option width'):
        parse_method("kerple").build_scores(4, width=3)


def test_dape_methods_lists_them_all(capsys):
    assert main(["methods", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert {record["name"] for record in records} == {method.name for method in all_methods()}
    assert all(record["summary"] for record in records)
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines if line.startswith("  ")} >= {m.name for m in all_methods()}


def test_help_and_mistakes(capsys):
    assert main([]) == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in COMMANDS)
    assert main(["--version"]) == 0
    assert main(["fly"]) == 2
    assert 'unknown command "fly"' in capsys.readouterr().err


def test_import_needs_torch_alone():
    """`import dape` loads nothing that torch does not load itself, its own modules apart."""
    code = (
        "import sys, torch, torch.utils.checkpoint; before = {name.split('.')[0] for name in sys.modules};"
        "import dape; after = {name.split('.')[0] for name in sys.modules};"
        "extra = {n for n in after - before if n not in sys.stdlib_module_names};"
        "assert extra == {'dape'}, extra"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
