"""Encodings in a user's own file: in every command, in worker processes, recorded, checked; sweeps and merging."""

import os
import re
from pathlib import Path

import pytest
from builders import SMALL_RUN
from processes import Worker, python

import dape
from dape import POSITIONS, plugins
from dape.cli import check, main
from dape.lab.comparison import load_comparison
from dape.lab.experiment import Local

FILE = '''
import dape
from dape.positions import DistanceEncoding

class Straight(DistanceEncoding):
    """−|i − j|."""
    summary = "minus the distance"

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def at(self, distance, *, causal):
        return SIGN * distance.abs().expand(self.num_heads, *distance.shape).float()

SIGN = -1
dape.register_position("straight", Straight)
'''
SMALL = "--num-layers 1 --hidden-size 16 --num-heads 4 --train-length 8 --batch-size 2 --windows 6 --last 4 --lengths 8,32"
SMALL += " --validation 0.5 --steps 3 --no-equal-time"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of one's own, and registries that forget it afterwards."""
    monkeypatch.setenv(plugins.VARIABLE, "")
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    yield path
    POSITIONS.pop("straight", None)
    for name in [name for name in plugins.LOADED if name.endswith("mine.py")]:
        del plugins.LOADED[name]


def test_an_encoding_in_a_file_is_a_method_in_worker_processes_and_is_recorded(mine, tmp_path, text) -> None:
    command = ["compare", "--methods", "dape1x3-straight", "--corpus", text, *SMALL.split()]
    assert main([*command, "--out", str(tmp_path / "out"), "--import", str(mine)]) == 0
    found = load_comparison(tmp_path / "out")
    assert set(found.frame["method"]) == {"dape1x3-straight"}
    assert list(found.about.environment["imports"]) == ["mine.py"]


def test_a_run_names_the_file_that_its_method_is_in(mine, tmp_path, text, capsys, monkeypatch) -> None:
    out = str(tmp_path / "run")
    sizes = "--num-layers 1 --hidden-size 16 --num-heads 4 --train-length 8 --batch-size 2 --steps 2"
    command = ["train", "--method", "straight", "--corpus", text, *sizes.split(), "--out", out]
    assert main([*command, "--import", str(mine)]) == 0
    assert main(["eval", out, "--lengths", "8", "--windows", "2", "--import", str(mine)]) == 0
    POSITIONS.pop("straight")
    plugins.LOADED.clear()
    monkeypatch.setenv(plugins.VARIABLE, "")
    capsys.readouterr()
    assert main(["eval", out, "--lengths", "8"]) == 2
    assert "it was trained with --import mine.py" in capsys.readouterr().err


def test_check_says_which_properties_fail(mine: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(check, "PROCESSORS", ("dape1x3-{}",))
    # Named twice, it is loaded once.
    assert main(["check", str(mine), "--import", str(mine)]) == 0
    assert "dape1x3-straight: all" in capsys.readouterr().out
    POSITIONS.pop("straight")
    monkeypatch.setattr(check, "PROCESSORS", ("{}",))
    # A bias that is not a number for the query's own key breaks everything that is compared.
    mine.write_text(FILE.replace("SIGN = -1", "SIGN = float('nan')"))
    assert main(["check", str(mine)]) == 1
    said = capsys.readouterr().out
    failing = r"^straight: fails \d+ of \d+ properties\n  nothing leaks from the future.*: differs by nan$"
    assert re.search(failing, said, re.M)
    POSITIONS.pop("straight")
    # What goes wrong in the same way everywhere is said once.
    mine.write_text(FILE.replace("super().__init__()", "raise TypeError('no such thing')"))
    assert main(["check", str(mine)]) == 1
    assert re.search(r"^  all \d+ properties: TypeError: no such thing$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["methods", "--import", "nowhere.py"], "there is no such file"),
        (["methods", "--import", "no_such_module_here"], "there is no such module"),
        (["methods", "--import"], "--import is followed by a file"),
        (["sweep", "--methods", "kerple"], "a sweep needs something to vary"),
        (["sweep", "--over", "learning_rate"], "is not of the form name=value,value"),
        (["sweep", "--over", "learning_rat=1,2"], 'did you mean "learning_rate"'),
        (["sweep", "--over", "learning_rate=-1"], "--learning-rate=-1"),
        (["sweep", "--over", "train_length=32,64"], "--over train_length: run `dape compare` for each"),
        (["sweep", "--over", "seed=0,1"], "--over seed: give --seeds 0,1"),
        (["sweep", "--over", "method=kerple,rope"], "--over method: give --methods A,B"),
        (["sweep", "--over", "backend=cpu,tiled"], "--over backend: it does not change what is trained"),
        (["sweep", "--over", "accumulate=1,2"], "--over accumulate: it does not change what is trained"),
        (["sweep", "--over", "corpus=a,b"], "--over corpus: a sweep uses one text"),
        (["merge", "one"], "name two folders or more"),
    ],
)
def test_mistakes_get_a_sentence(arguments: list[str], sentence: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, "")
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_a_sweep_compares_variants_and_folders_merge(tmp_path, text, capsys, monkeypatch) -> None:
    monkeypatch.setattr(Local, "start", Worker.start_for)
    shared = ["--methods", "kerple", "--corpus", text, *SMALL.split()]
    over = ["--over", "learning_rate=1e-3,2e-3"]
    assert main(["sweep", *shared, *over, "--out", str(tmp_path / "swept")]) == 0
    found = load_comparison(tmp_path / "swept")
    assert list(found.table().index) == ["kerple, learning_rate 0.001", "kerple, learning_rate 0.002"]
    assert "dape sweep " in found.about.command
    assert " --over learning_rate=1e-3,2e-3 " in found.about.command
    how = {**SMALL_RUN, "lengths": [8, 32], "last": 4, "windows": 6, "steps": 3, "equal_time": False}
    dape.compare(["kerple"], corpus=text, out=str(tmp_path / "plain"), **how)
    folders = [str(tmp_path / "swept"), str(tmp_path / "plain")]
    capsys.readouterr()
    assert main(["merge", *folders, "--out", str(tmp_path / "both")]) == 0
    assert "kerple, learning_rate 0.001" in capsys.readouterr().out
    merged = load_comparison(tmp_path / "both")
    assert len(merged.table()) == 3
    # On the same tokens they are paired.
    assert merged.about.baseline == "kerple, learning_rate 0.001"
    assert set(merged.table("difference").index) == {"kerple, learning_rate 0.002", "kerple"}


@pytest.mark.usefixtures("mine")
def test_an_installed_package_names_its_encodings_by_an_entry_point(tmp_path: Path) -> None:
    """As pip leaves it: a module and a .dist-info folder on the path, here of a process of its own."""
    site = tmp_path / "site"
    (site / "straight-1.0.dist-info").mkdir(parents=True)
    (site / "straight_encoding.py").write_text(FILE)
    metadata = "Metadata-Version: 2.1\nName: straight\nVersion: 1.0\n"
    (site / "straight-1.0.dist-info" / "METADATA").write_text(metadata)
    points = f"[{plugins.GROUP}]\nstraight = straight_encoding\n"
    (site / "straight-1.0.dist-info" / "entry_points.txt").write_text(points)
    path = os.pathsep.join([str(site), str(Path(dape.__file__).parents[1])])
    assert "straight" in python("-m", "dape", "methods", PYTHONPATH=path)
