"""The lm-evaluation-harness on our models, offline, with a local task."""

import json

import pytest

pytest.importorskip("lm_eval")

import torch
from lm_eval.tasks._index import TaskIndex

from dape.cli import main
from dape.models import DapeForCausalLM, preset
from dape.models.byte_tokenizer import byte_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and of its data library

TASK = """
task: brackets
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""
QUESTIONS = [{"question": f"def f{i}(x", "choices": [")", "(", " ü"], "answer": i % 3} for i in range(6)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run")
    model = DapeForCausalLM(preset("tiny", num_hidden_layers=1, hidden_size=32, score_width=8))
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "tasks").mkdir()
    data = folder / "tasks" / "brackets.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    (folder / "tasks" / "brackets.yaml").write_text(TASK.format(data=data))
    return folder


@pytest.fixture(autouse=True)
def _without_the_tasks_of_the_harness(monkeypatch):
    """It reads 14,000 files at every start."""
    build = TaskIndex.build
    ours = lambda self, paths: build([path for path in paths if "lm_eval" not in path.parts])  # noqa: E731 (a name for a line)
    monkeypatch.setattr(TaskIndex, "build", ours)


def test_a_local_task_gives_the_accuracy_that_the_model_has(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = ["--tasks", str(run / "tasks"), "--output-path", str(tmp_path), "--device", "cpu"]
    assert main(["lm-eval", str(run / "model"), *arguments]) == 0
    (out,) = tmp_path.rglob("results*.json")
    model = DapeForCausalLM.from_pretrained(run / "model").eval()
    right = 0
    for question in QUESTIONS:
        totals = []
        for choice in question["choices"]:
            context, answer = question["question"].encode(), choice.encode()
            ids = torch.tensor([list(context + answer)])
            log = model(ids).logits.log_softmax(-1)[0, len(context) - 1 : -1]
            totals.append(log.gather(-1, ids[0, len(context) :, None]).sum().item())
        right += totals.index(max(totals)) == question["answer"]
    assert json.loads(out.read_text())["results"]["brackets"]["acc,none"] == pytest.approx(
        right / len(QUESTIONS)
    )


def test_an_entry_point_names_the_model():
    """Versions after 0.4.13 read these; a registry of 0.4.13 resolves one that it is handed."""
    from importlib.metadata import entry_points

    from lm_eval.api.registry import Registry, get_model

    from dape.harness import DapeLM, register

    register()
    assert get_model("dape") is DapeLM
    (ours,) = [point for point in entry_points(group="lm_eval.models") if point.name == "dape"]
    registry: Registry = Registry("model")
    registry.register("dape", target=ours)
    assert registry.get("dape") is DapeLM


def bare(run, path):
    """The model without a tokenizer."""
    DapeForCausalLM.from_pretrained(run / "model").save_pretrained(path / "bare")
    return path / "bare"


MISTAKES = {
    "no model": (lambda run, path: [run / "tasks", "--tasks", run / "tasks"], "is not a run folder"),
    "no tokenizer": (lambda run, path: [bare(run, path), "--tasks", run / "tasks"], 'pass tokenizer=FOLDER with one that has, or "bytes"'),
    "no task file": (lambda run, path: [run / "model", "--tasks", "missing.yaml"], "Tasks not found: "),
    "unknown task": (lambda run, path: [run / "model", "--tasks", "no_such_task"], "Tasks not found: no_such_task"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_sentence(case, run, tmp_path, capsys):
    arguments, message = MISTAKES[case]
    words = list(map(str, arguments(run, tmp_path)))
    capsys.readouterr()
    assert main(["lm-eval", *words]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
