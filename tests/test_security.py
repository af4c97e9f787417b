"""Folders are data: no code from them runs, no pickle is read, text in pages is escaped."""

import json
import pickle
import re
from pathlib import Path

import pytest
from builders import decoder

import dape
from dape import cli
from dape.loading import open_for_evaluation
from dape.models import export
from dape.models.byte_tokenizer import byte_tokenizer
from dape.training import TrainConfig
from dape.training.run import Run

SOURCES = Path(dape.__file__).parent


class Mark:
    """Unpickled, it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def hostile(tmp_path):
    """A model whose folder also holds code and pickles that would leave a mark if they ran."""
    folder, mark = tmp_path / "run" / "model", tmp_path / "mark"
    export(decoder(vocab_size=257), folder, tokenizer=byte_tokenizer(), with_code=True)
    (folder / "checksums.json").unlink()
    for file in folder.glob("*.py"):
        file.write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n" + file.read_text())
    for name in ("pytorch_model.bin", "training_args.bin", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(Mark(mark)))
    (folder.parent / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'w')")
    return folder, mark


def test_nothing_in_a_folder_runs(hostile):
    folder, mark = hostile
    Run(folder.parent, TrainConfig()).model()
    with open_for_evaluation(f"hf:{folder}", corpus=str(SOURCES / "settings.py")):
        pass
    assert not mark.exists()


# torch's own, of the protocol.
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_model_that_is_a_pickle_alone_is_refused_in_a_sentence(hostile, capsys):
    folder, mark = hostile
    (folder / "model.safetensors").unlink()
    assert cli.main(["eval", f"hf:{folder}", "--corpus", str(SOURCES / "settings.py")]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith("a pickle that is damaged, or of more than tensors, which is not read")
    )
    assert not mark.exists()


def test_a_model_that_needs_foreign_code_is_refused_at_once(hostile):
    folder, mark = hostile
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "nosuch"}))
    with pytest.raises(ValueError, match="contains custom code"), open_for_evaluation(f"hf:{folder}"):
        pass
    assert not mark.exists()


def test_no_source_of_ours_trusts_remote_code_or_reads_pickles():
    for path in SOURCES.rglob("*.py"):
        code = re.sub(r'(""".*?"""|#[^\n]*)', "", path.read_text(), flags=re.S)
        assert not re.search(r"trust_remote_code\s*=\s*True\s*[,)]", code), path
        assert not re.search(r"\b(pickle|torch)\.load\(|yaml\.load\(", code), path


def test_help_and_docs_say_that_task_files_can_run_code(capsys):
    pytest.importorskip("lm_eval")
    from dape import cli

    assert cli.main(["lm-eval", "--help"]) == 0
    assert "!function" in capsys.readouterr().out
    root = SOURCES.parents[1]
    for name in ("SECURITY.md", "docs/hugging_face.md"):
        assert "!function" in (root / name).read_text()
