"""`dape train` and `dape generate` from text to text, on a model of a second."""

import json
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dape import cli
from dape.cli.train import parse_training
from dape.data import ByteTokenizer, prepare, train_bpe
from dape.generation import TextStreamer, generate_text
from dape.loading import open_for_evaluation
from dape.training import TrainConfig, load_run, train
from dape.training.run import LanguageModelling, Run, build_model

SMALL = ["--num-layers", "2", "--hidden-size", "32", "--num-heads", "2", "--train-length", "16"]
SMALL += ["--batch-size", "8", "--steps", "30", "--score-width", "8"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"{number}: the cat sat on the mat, née Ürsüla. " * 40)
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    out = tmp_path_factory.mktemp("runs") / "small"
    arguments = ["train", *SMALL, "--corpus", str(corpus), "--validation", "5.txt", "--out", str(out)]
    assert cli.main(arguments) == 0
    return out


def test_a_run_has_everything_that_later_commands_need(run_folder, corpus):
    run = load_run(run_folder)
    assert (run.config.method, run.config.steps, run.config.num_layers) == ("dape1x3-kerple", 30, 2)
    assert [record["step"] for record in run.metrics()] == list(range(1, 31))
    assert run.metrics()[-1]["loss"] < run.metrics()[0]["loss"] - 0.5
    assert set(run.metrics()[0]) == {"step", "loss", "learning_rate", "gradient_norm", "tokens", "seconds"}
    assert run.metrics()[-1]["tokens"] == 30 * 8 * 16
    # The validation loss of the last step is that of the model that was exported.
    assert [record["step"] for record in run.metrics() if "validation_loss" in record] == [30]
    task = LanguageModelling(
        run.model(), run.data().train.ids, train_length=16, batch_size=8, validation=run.data().validation.ids
    )
    with torch.no_grad():
        losses = [task.loss(task.model, batch).item() for batch in task.held_out()]
    assert len(losses) == 8
    assert run.metrics()[-1]["validation_loss"] == pytest.approx(sum(losses) / 8, rel=1e-5)
    data = run.data()
    assert data.validation.num_documents == 1
    assert data.tokenizer.decode(data.validation.ids[:6]) == "5: the"
    assert not run.model().training


def test_a_moved_run_goes_on_if_its_text_is_the_same(run_folder, corpus, tmp_path, capsys):
    """The text is identified by its content, not by its path."""
    moved = shutil.copytree(run_folder.parent, tmp_path / "elsewhere") / run_folder.name
    text = shutil.copytree(corpus, tmp_path / "text")
    again = ["train", *SMALL, "--corpus", str(text), "--validation", "5.txt", "--out", str(moved)]
    assert cli.main(again) == 0
    record = json.loads((moved / "run.json").read_text())
    assert record["text"] == load_run(moved).data().manifest["sources"]["sha256"]
    beside = f"/nowhere/{Path(record['data']).name}"
    (moved / "run.json").write_text(json.dumps({**record, "data": beside}))
    assert len(load_run(moved).data().train) > 0
    (text / "0.txt").write_text("another text")
    (moved / "run.json").write_text(json.dumps({**record, "corpus": "/nowhere"}))
    capsys.readouterr()
    assert cli.main([*again, "--data", str(tmp_path / "packed")]) == 2
    assert "has another text than the run in" in capsys.readouterr().err


def test_another_text_in_the_same_place_neither_continues_nor_evaluates_a_run(tmp_path, corpus):
    text, out = shutil.copytree(corpus, tmp_path / "text"), tmp_path / "run"
    arguments = ["--corpus", str(text), "--validation", "5.txt", "--tokenizer", "bpe:300", "--out", str(out)]
    config = parse_training([*SMALL, *arguments])
    run = train(config, progress=False, on_step=lambda record: record["step"] == 3)
    before, data = (out / "run.json").read_text(), Path(run.config.data)
    shutil.rmtree(data)
    (text / "0.txt").write_text("a dog ran up the hill. " * 90)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{data} has another text than the run in {out} .* restore"):
            train(config, progress=False)
        with pytest.raises(ValueError, match=f"{data} has another text than the run in {out}"):
            load_run(out).data()
    assert (out / "run.json").read_text() == before
    shutil.copy(corpus / "0.txt", text)
    shutil.rmtree(data)
    assert train(config, progress=False).result.steps == 30


@pytest.mark.parametrize("change", [{"tokenizer": "bpe:300"}, {"validation": ["4.txt"]}], ids=[*"ab"])
def test_the_same_text_packed_otherwise_is_not_the_run_s_data(run_folder, corpus, tmp_path, change):
    moved, options = tmp_path / "run", {"validation": ["5.txt"], **change}
    shutil.copytree(run_folder, moved)
    data = prepare(str(corpus), tmp_path / "packed", progress=False, **options)
    config = replace(load_run(moved).config, data=str(data.folder))
    with pytest.raises(ValueError, match=r"packed has another (tokenizer|training split) than the run"):
        Run(moved, config).data()
    other_tokenizer = pytest.raises(ValueError, match="packed has another tokenizer than the run")
    with (
        other_tokenizer if "tokenizer" in change else nullcontext(),
        open_for_evaluation(str(moved), data=data.folder),
    ):
        pass


@pytest.mark.parametrize("folder", [".", "model"])
def test_the_run_and_its_model_are_hugging_face_folders(run_folder, folder):
    model = AutoModelForCausalLM.from_pretrained(run_folder / folder)
    tokenizer = AutoTokenizer.from_pretrained(run_folder / folder)
    run = load_run(run_folder)
    ids = tokenizer("the cat, née", return_tensors="pt").input_ids
    assert ids[0].tolist() == run.data().tokenizer.encode("the cat, née")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, run.model()(ids).logits)


def test_the_same_command_again_does_nothing_and_another_run_is_refused(run_folder, corpus, capsys):
    again = ["train", *SMALL, "--corpus", str(corpus), "--validation", "5.txt", "--out", str(run_folder)]
    before = (run_folder / "metrics.jsonl").read_text()
    assert cli.main(again) == 0
    assert (run_folder / "metrics.jsonl").read_text() == before
    assert cli.main([*again, "--method", "rope"]) == 2
    assert "holds a run with method=dape1x3-kerple, now method=rope was given" in capsys.readouterr().err


def test_an_unfinished_run_says_how_to_finish_it(tmp_path, corpus):
    words = ["--corpus", str(corpus), "--out", str(tmp_path / "run"), "--log-every", "1"]
    config = parse_training([*SMALL, *words])
    run = train(config, progress=False, on_step=lambda record: record["step"] == 3)
    assert run.result is not None
    assert (run.result.steps, run.result.stopped_early) == (3, "on_step")
    with pytest.raises(FileNotFoundError, match=r"not finished \(3 of 30 steps\)"):
        load_run(run.folder).model()
    assert train(config, progress=False).result.steps == 30
    assert load_run(run.folder).trained


def test_a_model_s_folder_in_place_of_a_run_s_says_which_it_is(run_folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"the run is {run_folder}"):
        load_run(run_folder / "model")
    record = {"dape_version": "9.0", "method": "rope", "train_length": 64, "colour": "red"}
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r'written by dape 9\.0, this is .*no option "colour".*install that'):
        load_run(tmp_path)
    (tmp_path / "run.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="looks like a Hugging Face model"):
        load_run(tmp_path)


def test_a_run_that_saved_nothing_makes_room_for_another(tmp_path, corpus):
    arguments = [*SMALL, "--corpus", str(corpus), "--out", str(tmp_path / "run"), "--checkpoint-every", "2"]

    def stop(record):
        raise KeyError("before anything is saved")

    with pytest.raises(KeyError):
        train(parse_training([*arguments, "--learning-rate", "1000"]), progress=False, on_step=stop)
    ended = train(
        parse_training([*arguments, "--learning-rate", "0.001"]),
        progress=False,
        on_step=lambda r: r["step"] == 3,
    )
    assert [record["step"] for record in ended.metrics()] == list(range(1, ended.result.steps + 1))
    with pytest.raises(ValueError, match=r"holds a run with learning_rate=0\.001"):
        train(parse_training([*arguments, "--learning-rate", "0.01"]), progress=False)


def test_a_text_shorter_than_a_window_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    arguments = [*SMALL, "--corpus", str(tmp_path / "short.txt"), "--validation", "0"]
    with pytest.raises(ValueError, match="the training split has 9 tokens, train_length=16 needs at least"):
        train(parse_training([*arguments, "--out", str(tmp_path / "run")]), progress=False)


def test_options_win_over_the_file_and_the_file_over_the_recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("preset: 125m\nbatch_size: 8\nsteps: 200\nscore_options: {depth: 3, padding: causal}\n")
    config = parse_training(["--config", str(file), "--steps", "100", "--tokenizer", "bytes"])
    assert config.score_options == {"depth": 3, "padding": "causal"}
    assert (config.preset, config.batch_size, config.steps, config.warmup_steps) == ("125m", 8, 100, 1)
    assert config.learning_rate == 6e-4
    assert type(config) is TrainConfig


def test_options_of_the_encoding_and_of_the_convolution_reach_the_model(tmp_path, corpus):
    method = "dape1x3-rope[depth=3,factor=4,scaling=ntk]"
    arguments = [*SMALL, "--steps", "1", "--method", method, "--corpus", str(corpus)]
    assert cli.main(["train", *arguments, "--out", str(tmp_path / "run")]) == 0
    run = load_run(tmp_path / "run")
    assert run.config.method == method
    assert len(run.model().model.layers[0].attention.scores.middle) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--method", "rope[scalin=yarn]"], '"rope" has no option scalin; it has base, scaling'),
        (["--method", "rope[scaling=yarm]"], 'unknown scaling "yarm"'),
        (["--warmup-steps", "100", "--steps", "10"], "--warmup-steps=100 exceeds steps=10: the learning rate would never"),
        (["--method", "rope[scaling]"], '"scaling" in "rope[scaling]" is not an option: write name=value'),
        (["--method", "rope[depth=3]"], '"rope" has no option depth; it has'),
        (["--method", "dape-rope[deph=3]"], "no option deph; it has"),
        (["--method", "dape-rope[depth=1]"], "depth=1 must be a whole number, at least 2"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_get_a_sentence(arguments, sentence, capsys):
    assert cli.main(["train", "--method", "rope", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_the_help_shows_the_presets_own_defaults(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["train", "--preset", "350m", "--help"])
    assert "(default: 0.0003)" in capsys.readouterr().out


def test_batches_depend_on_seed_and_step_alone(corpus):
    import numpy as np

    ids = np.arange(1000, dtype=np.uint16)
    configs = [TrainConfig(method=method, hidden_size=32) for method in ("rope", "dape1x3-kerple")]
    models = [build_model(config, 256) for config in configs]
    tasks = [LanguageModelling(model, ids, train_length=16, batch_size=8, seed=3) for model in models]
    for step in (0, 1, 17):
        one, two = (task.batch(step) for task in tasks)
        assert torch.equal(one, two)
        assert torch.equal(one[:, 1:], one[:, :-1] + 1)
    assert not torch.equal(tasks[0].batch(0), tasks[0].batch(1))
    parts = [tasks[0].shard(tasks[0].batch(0), rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat(parts), tasks[0].batch(0))


def test_generate_streams_past_the_training_length(run_folder, capsys):
    words = ["generate", str(run_folder), "--prompt", "the cat", "--tokens", "40"]
    assert cli.main(words) == 0
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate_text(load_run(run_folder).model(), ByteTokenizer(), "")
    first = capsys.readouterr()
    assert first.out.startswith("the cat")
    assert "[47 tokens in all, trained on windows of 16;" in first.err
    assert cli.main(words) == 0
    assert capsys.readouterr().out == first.out
    assert cli.main([*words, "--seed", "1"]) == 0
    assert capsys.readouterr().out != first.out


def test_greedy_text_is_what_the_whole_forward_says(run_folder):
    run = load_run(run_folder)
    model, tokenizer = run.model(), run.data().tokenizer
    pieces: list[str] = []
    text = generate_text(model, tokenizer, "the cat ", tokens=24, temperature=0, write=pieces.append)
    assert "".join(pieces) == text
    ids = torch.tensor([tokenizer.encode("the cat ")])
    for _ in range(24):
        with torch.no_grad():
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    assert tokenizer.decode(ids[0, 8:].tolist()) == text


TEXT = "naïve café — 東京 🗼 and plain words, then    spaces\n"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), train_bpe([TEXT * 3], 300)], ids=["bytes", "bpe"])
def test_a_streamer_writes_whole_characters_and_all_of_them(tokenizer):
    pieces: list[str] = []
    streamer = TextStreamer(tokenizer, pieces.append)
    ids = tokenizer.encode(TEXT)
    streamer.put(torch.tensor([ids[:2]]))
    for token in ids[2:]:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert tokenizer.decode(ids[:2]) + "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_kill_in_the_first_write_of_a_run_does_not_block_its_folder(tmp_path):
    from dape.training.run import check_continues

    config = TrainConfig(out=str(tmp_path))
    (tmp_path / ".lock").touch()
    (tmp_path / ".writing-123456-run.abc.json").write_text('{"half')
    check_continues(tmp_path, config)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is not a run folder"):
        check_continues(tmp_path, config)


def test_a_step_lasts_until_its_numbers_are_there(tmp_path, monkeypatch):
    """On a GPU a step's call returns before its work is done: the wait when metrics are read is the steps' time."""
    import toy

    from dape.training.display import read_metrics
    from dape.training.parallel import Parallel

    whole = Parallel.total

    def later(self, values):
        time.sleep(0.2)
        return whole(self, values)

    monkeypatch.setattr(Parallel, "total", later)
    result = toy.train(tmp_path, steps=4, log_every=2)
    assert result.seconds >= 0.4
    seconds = [record["seconds"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert seconds == sorted(seconds)
    assert min(after - before for before, after in zip([0.0, *seconds], seconds, strict=False)) >= 0.1
