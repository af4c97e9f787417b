"""`dape retrofit`: from a pretrained model to a retrofitted one, interrupted and continued, from any text."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dape
from dape import cli
from dape.data import ByteTokenizer
from dape.evaluation.table import make_table, perplexities, read_table
from dape.loading import load_causal_lm
from dape.retrofitting import parameter_groups
from dape.retrofitting.adapt import with_sinks
from dape.retrofitting.matching import LayerMatching, Overlapping
from dape.retrofitting.report import Report
from dape.retrofitting.tuning import Tuning, sample


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Llama of bytes, with a tokenizer beside it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "base"
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    ByteTokenizer().save(folder)
    return folder


def run(base, out, *more):
    arguments = ["--steps", "6", "--batch-size", "4", "--windows", "4", "--log-every", "1"]
    if "--method" not in more:
        arguments += ["--method", "dape1x3-kerple"]
    return cli.main(["retrofit", str(base), "--out", str(out), *arguments, "--device", "cpu", *more])


SELF = ["--corpus", "self", "--sample-tokens", "3000"]


def weights(out):
    model = dape.load_retrofitted(out / "model")
    return model.state_dict()


def test_text_of_its_own(base, tmp_path, capsys):
    assert run(base, tmp_path / "run", *SELF, "--distill", "0.5") == 0
    printed = capsys.readouterr().out
    table = read_table(tmp_path / "run" / "results.csv.gz")
    ppl = perplexities(table)
    assert list(ppl.loc["base"].dropna().index) == [4, 8, 16, 32, 64, 128]
    assert list(ppl.loc["dape1x3-kerple"].dropna().index) == [16, 32, 64, 128]
    assert f"{ppl.loc['base'][128]:.2f}" in printed
    assert f"{ppl.loc['dape1x3-kerple'][128]:.2f}" in printed
    assert "base, cut to 16" in printed
    model = dape.load_retrofitted(tmp_path / "run" / "model")
    assert model.config.dape_retrofit["method"] == "dape1x3-kerple"
    assert model(torch.ones(1, 100, dtype=torch.long)).logits.isfinite().all()


def test_an_interrupted_command_continues_to_the_same_weights(base, tmp_path, monkeypatch):
    assert run(base, tmp_path / "whole", *SELF) == 0
    from dape.retrofitting import adapt as module

    whole = module.fit
    monkeypatch.setattr(
        module,
        "fit",
        lambda *args, **options: whole(*args, **options, on_step=lambda record: record["step"] == 3),
    )
    assert run(base, tmp_path / "parts", *SELF) == 1
    assert not (tmp_path / "parts" / "model").exists()
    monkeypatch.undo()
    assert run(base, tmp_path / "parts", *SELF) == 0
    parts = weights(tmp_path / "parts")
    for name, value in weights(tmp_path / "whole").items():
        torch.testing.assert_close(parts[name], value, rtol=0, atol=0)


def test_a_folder_of_texts(base, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"The cat number {number} sat on the mat. " * 10)
    assert run(base, tmp_path / "run", "--corpus", str(texts), "--method", "fox", "--trains", "added") == 0
    after, before = weights(tmp_path / "run"), LlamaForCausalLM.from_pretrained(base).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--method", "kerpel"], "unknown method"),
        (["--last", "20"], "is more than the shortest"),
        (["--last", "4", "--lengths", "2,8"], "is more than the shortest"),
        (
            ["--sample-tokens", "600"],
            "leaves 64 tokens for the table, whose longest input needs 129: sample 1600",
        ),
        (["--lengths", "16,1024"], "leaves 304 tokens for the table, whose longest input needs 1025"),
    ],
)
def test_mistakes_are_said_before_the_work(base, tmp_path, more, message, capsys):
    assert run(base, tmp_path / "run", *SELF, *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_other_settings_want_another_folder(base, tmp_path, capsys):
    assert run(base, tmp_path / "run", *SELF) == 0
    assert run(base, tmp_path / "run", *SELF, "--method", "kerple") == 2
    assert "another folder" in capsys.readouterr().err
    assert run(base, tmp_path / "run", *SELF, "--temperature", "2") == 2
    assert "result" in json.loads((tmp_path / "run" / "retrofit.json").read_text())


def test_what_was_added_learns_faster_and_the_teacher_is_matched(base):
    model = LlamaForCausalLM.from_pretrained(base)
    teacher = LlamaForCausalLM.from_pretrained(base)
    ids = np.arange(200) % 250
    dape.retrofit(model, "dape1x3")
    task = Tuning(model, ids, train_length=16, batch_size=2, teacher=teacher, distill=1.0, added_rate=3.0)
    assert set(task.rate_factors().values()) == {3.0}
    assert len(task.rate_factors()) == 8
    # At the start the model is its own teacher: nothing to learn.
    assert task.loss(model, task.batch(0)).abs() < 1e-5


def test_samples_follow_the_seed_and_begin_with_the_first_token(base):
    model = LlamaForCausalLM.from_pretrained(base)
    first, second = (sample(model, 5, 7, seed=seed, batch_size=3) for seed in (1, 1))
    assert first.shape == (5, 7)
    assert (first[:, 0] == 0).all()
    assert (first == second).all()
    assert (sample(model, 5, 7, seed=2, batch_size=3) != first).any()


def test_commands_load_what_was_retrofitted_as_what_it_is(base, tmp_path, capsys):
    """Whole folders and adapters, never the base alone in silence."""
    model = dape.retrofit(LlamaForCausalLM.from_pretrained(base), "dape1x3-kerple", zero_init=False)
    model.save_pretrained(tmp_path / "whole")
    ByteTokenizer().save(tmp_path / "whole")
    dape.save_adapter(model, tmp_path / "adapter")
    text = tmp_path / "text.txt"
    text.write_text("The cat sat on the mat. " * 40)
    ids = torch.tensor([ByteTokenizer().encode(text.read_text())[:33]])
    with torch.no_grad():
        logits = model.eval()(ids[:, :-1], use_cache=False).logits[0]
    for name in ("whole", "adapter"):
        out = tmp_path / f"{name}.json"
        options = [
            "--corpus",
            str(text),
            "--lengths",
            "32",
            "--last",
            "8",
            "--json",
            str(out),
            "--device",
            "cpu",
        ]
        assert cli.main(["eval", f"hf:{tmp_path / name}", *options, "--windows", "1000"]) == 0
        with torch.no_grad():
            again = load_causal_lm(tmp_path / name)(ids[:, :-1], use_cache=False).logits[0]
        torch.testing.assert_close(again, logits)
        assert "dape1x3-kerple" in out.read_text()
        capsys.readouterr()
        assert cli.main(["generate", str(tmp_path / name), "--prompt", "The", "--tokens", "5"]) == 0
        assert "retrofitted with dape1x3-kerple" in capsys.readouterr().err
        seen = ["--text", "The cat", "--lengths", "4", "--out", str(tmp_path / "seen" / name)]
        assert cli.main(["inspect", str(tmp_path / name), *seen]) == 0
        assert (tmp_path / "seen" / name / "index.html").exists()


def test_layers_that_kept_their_positions_match_at_the_start(base):
    model, teacher = (LlamaForCausalLM.from_pretrained(base) for _ in range(2))
    dape.retrofit(model, "dape1x3")
    ids = torch.arange(32).view(2, 16)
    assert LayerMatching(model, teacher).loss(ids) < 1e-8
    dape.remove_retrofit(model)
    dape.retrofit(model, "dape1x3-kerple")
    assert LayerMatching(model, teacher).loss(ids) > 1e-4


@pytest.mark.parametrize("method", ["dape1x3-kerple", "fox"])
def test_matching_teaches_each_layer_by_itself(base, method):
    model, teacher = (LlamaForCausalLM.from_pretrained(base) for _ in range(2))
    torch.manual_seed(0)
    dape.retrofit(model, method)
    matching, ids = LayerMatching(model, teacher), torch.randint(250, (8, 16))
    before = matching.loss(ids)
    before.backward()
    trained = {name for name, value in model.named_parameters() if value.grad is not None}
    assert all("self_attn" in name for name in trained)
    # What a layer is taught does not depend on the layers before it.
    lower = model.model.layers[0].self_attn
    own = [value.grad.clone() for value in model.model.layers[1].self_attn.parameters()]
    with torch.no_grad():
        lower.v_proj.weight.mul_(3)
    model.zero_grad()
    matching.loss(ids).backward()
    for first, second in zip(own, model.model.layers[1].self_attn.parameters(), strict=True):
        torch.testing.assert_close(first, second.grad)
    with torch.no_grad():
        lower.v_proj.weight.div_(3)
    optimizer = torch.optim.Adam([value for name, value in model.named_parameters() if "self_attn" in name])
    for _ in range(30):
        optimizer.zero_grad()
        matching.loss(ids).backward()
        optimizer.step()
    assert matching.loss(ids) < 0.7 * before
    assert not any(layer.self_attn._forward_hooks for layer in teacher.model.layers)


def test_matching_then_distilling_a_share_of_the_positions(base, tmp_path):
    assert (
        run(base, tmp_path / "run", *SELF, "--match-steps", "3", "--distill", "1", "--predicted-share", "0.3")
        == 0
    )
    model = LlamaForCausalLM.from_pretrained(base)
    dape.retrofit(model, "kerple")
    with pytest.raises(ValueError, match="teacher"):
        Tuning(model, np.arange(100), train_length=16, batch_size=2, match_steps=3)


def test_longer_inputs_are_known_by_overlapping_windows():
    reading = Overlapping(8)
    ids = torch.arange(2 * 20).view(2, 20)
    windows = reading.windows(ids)
    assert windows.shape == (2 * 4, 8)
    assert torch.equal(reading.rows(windows, 2), ids)
    within, places = reading.positions(0.5, 20)
    assert len(within) == 2
    assert (within >= 4).all()
    assert torch.equal(windows[:, within].view(2, -1), ids[:, places])
    assert torch.equal(reading.windows(ids[:, :5]), ids[:, :5])
    with pytest.raises(ValueError, match="windows of 8"):
        reading.windows(ids[:, :18])


@pytest.mark.parametrize("match_steps", [0, 5])
def test_a_teacher_reads_longer_windows_in_its_own_length(base, match_steps):
    model, teacher = (LlamaForCausalLM.from_pretrained(base) for _ in range(2))
    dape.retrofit(model, "dape1x3")
    read = []
    teacher.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    task = Tuning(
        model,
        np.arange(200) % 250,
        train_length=32,
        batch_size=2,
        teacher=teacher,
        distill=1.0,
        teacher_length=16,
        match_steps=match_steps,
    )
    # A model that reads 32 tokens at a time differs from one that reads 16 of them.
    assert task.loss(model, task.batch(0)) > 1e-6
    assert read == [(6, 16)]


def test_trainer_takes_the_groups_of_parameters(tmp_path, base):
    model = dape.retrofit(LlamaForCausalLM.from_pretrained(base), "dape1x3-kerple")
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-4, added_rate=50.0))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 250, (8, 12))]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    # Adam moves by the rate, whatever the gradient is.
    moved = {name: (value - before[name]).abs().max().item() for name, value in model.named_parameters()}
    added = max(value for name, value in moved.items() if ".score_processor.project." in name)
    own = max(
        value for name, value in moved.items() if "score_processor" not in name and "position" not in name
    )
    assert 4e-3 < added < 1.1e-2
    assert 1e-4 < own < 3e-4
    again = dape.load_retrofitted(tmp_path / "checkpoint-2")
    ids = torch.arange(12)[None]
    torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("method", ["dape1x3", "dape1x3-kerple", "fox", "talking-alibi"])
def test_shown_weights_are_used_weights(base, method):
    model = dape.retrofit(LlamaForCausalLM.from_pretrained(base), method).eval()
    ids = torch.randint(0, 250, (14,))
    shown = dape.inspect(model, ids)
    used = model(ids[None], output_attentions=True).attentions
    for layer, weights in enumerate(used):
        for head in range(4):
            found = torch.from_numpy(shown.map(layer, head, "weights")).nan_to_num()
            torch.testing.assert_close(found, weights[0, head].detach(), rtol=1e-4, atol=1e-6)
    assert shown.method.startswith(method)
    with pytest.raises(TypeError, match="retrofitted"):
        dape.inspect(LlamaForCausalLM.from_pretrained(base), ids)


def test_the_base_trained_on_stands_beside_the_retrofit(base, tmp_path):
    """The decisive baseline has as many steps on as many tokens, and is cut to the window."""
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"The cat number {n} sat on mat {n % 7}. " for n in range(2000)))
    model = LlamaForCausalLM.from_pretrained(base)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adapted = dape.adapt(
        model,
        "kerple",
        str(texts),
        steps=8,
        batch_size=2,
        train_length=32,
        control=True,
        windows=8,
        device="cpu",
    )
    assert {arm: result.steps for arm, result in adapted.results.items()} == {
        ("base trained on", 0): 8,
        ("retrofit", 0): 8,
    }
    assert len({result.tokens for result in adapted.results.values()}) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    report = adapted.report
    own, cut = report.loss("base trained on", 16), report.loss("base", 16)
    assert own.value != cut.value
    gain = report.gain("kerple", 64)
    assert gain.value == pytest.approx(own.value - report.loss("kerple", 64).value, abs=1e-6)
    assert gain.low < gain.value < gain.high
    # What costs nothing stands first.
    assert [row[0] for row in report.rows()][:4] == [
        "base, cut to 16",
        "base trained on, cut to 16",
        "base",
        "kerple",
    ]


def test_seeds_are_trained_side_by_side_and_decide_together(base, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"The cat number {n} sat on mat {n % 7}. " for n in range(2000)))
    model = LlamaForCausalLM.from_pretrained(base)
    how = {"steps": 2, "batch_size": 2, "windows": 4, "control": True, "lengths": "16,32", "device": "cpu"}
    both = dape.adapt(model, "kerple", str(texts), seeds=2, jobs=2, out=tmp_path / "both", **how)
    one = dape.adapt(model, "kerple", str(texts), seed=0, out=tmp_path / "one", **how)
    assert both.report.gain("kerple", 32).seeds == 2
    assert set(both.table["seed"]) == {0, 1}
    first = both.table[both.table["seed"] == 0].reset_index(drop=True)
    pd.testing.assert_frame_equal(
        first.drop(columns="corpus"), one.table.drop(columns="corpus"), check_exact=False, rtol=1e-5
    )
    # A seed more leaves those that are trained as they are.
    more = dape.adapt(model, "kerple", str(texts), seeds=3, out=tmp_path / "both", **how)
    assert len(more.results) == 6
    assert more.report.gain("kerple", 32).seeds == 3


def test_untrained_scalings_stand_beside_it(base, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"The cat number {n} sat on mat {n % 7}. " for n in range(2000)))
    model = LlamaForCausalLM.from_pretrained(base)
    adapted = dape.adapt(
        model,
        "kerple",
        str(texts),
        steps=2,
        windows=4,
        device="cpu",
        lengths="16,64",
        untrained="rope-scalings",
    )
    ppl = perplexities(adapted.table)
    arms = [arm for arm in ppl.index if arm.endswith(", untrained")]
    assert [arm.split(",")[0] for arm in arms] == [
        *(f"rope[scaling={kind}" for kind in ("linear", "ntk", "dynamic", "yarn")),
        *("selfextend[near=8", "selfextend[near=8]", "rope[normaliser=ssmax", "sinks"),
    ]
    # Position interpolation changes every length; dynamic NTK and an input that needs no cut none up to the window.
    for arm in (arms[2], "sinks, untrained"):
        assert ppl.loc[arm][16] == pytest.approx(ppl.loc["base"][16], rel=1e-4)
    assert abs(ppl.loc[arms[0]][16] - ppl.loc["base"][16]) > 1e-3
    assert abs(ppl.loc["sinks, untrained"][64] - ppl.loc["base"][64]) > 1e-3
    assert sum("untrained" in label for label, _ in adapted.report.rows()) == 8


def test_by_default_the_rotation_is_stretched_and_convolved(base, tmp_path):
    """To the longest length of the table, in windows of four times the base's and as many tokens a step as 16 of those."""
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"The cat number {n} sat on mat {n % 7}. " for n in range(2000)))
    model = LlamaForCausalLM.from_pretrained(base)
    how = {"steps": 1, "windows": 4, "lengths": "16,64", "device": "cpu"}
    adapted = dape.adapt(model, texts=str(texts), out=tmp_path / "out", **how)
    [method] = adapted.report.retrofits
    assert method == "dape1x3-rope[scaling=yarn,factor=4,original_length=16]"
    settings = json.loads((tmp_path / "out" / "retrofit.json").read_text())["settings"]
    assert (settings["train_length"], settings["batch_size"]) == (64, 4)
    assert adapted.results["retrofit", 0].tokens == 16 * 16
    # The same command continues with the same settings.
    assert dape.adapt(model, texts=str(texts), out=tmp_path / "out", **how).report.retrofits == [method]


def test_sinks_are_the_first_tokens_of_what_is_cut():
    ids = np.arange(41)[None]
    assert with_sinks(ids, 10).tolist() == [[0, 1, 2, 3, *range(34, 41)]]
    assert with_sinks(ids, 40) is ids


def test_a_base_that_ignores_its_context_is_said_to():
    rows = [
        {"run": m, "method": m, "metric": "loss", "train_length": 16, "length": n, "document": d, "sum": 8.0, "count": 4}
        for m in ("base", "kerple")
        for n in (4, 8, 16, 32)
        for d in range(6)
    ]  # fmt: skip
    sentences = Report(make_table(rows)).sentences()
    assert any("no measurable use" in sentence for sentence in sentences)
    assert not any("below" in sentence for sentence in sentences)


def test_a_run_of_ours_is_a_base_too(tmp_path):
    """And its own model stays as it was."""
    run = dape.train(
        out=str(tmp_path / "run"),
        method="rope",
        steps=2,
        train_length=16,
        hidden_size=32,
        num_heads=4,
        num_layers=1,
        batch_size=2,
        device="cpu",
    )
    code = cli.main(
        [
            "retrofit",
            str(run.folder),
            "--corpus",
            "stdlib",
            "--steps",
            "2",
            "--windows",
            "4",
            "--device",
            "cpu",
            "--out",
            str(tmp_path / "out"),
        ]
    )
    assert code == 0
    method = load_causal_lm(tmp_path / "out" / "model").config.method
    assert method == "dape1x3-rope[factor=8,original_length=16,scaling=yarn]"


def test_samples_are_as_long_as_the_base_reads(base, tmp_path):
    longer = ["--train-length", "32", "--match-steps", "6", "--lengths", "16,32"]
    assert run(base, tmp_path / "run", *SELF, *longer) == 0
    assert np.load(tmp_path / "run" / "samples.npy").shape[1] == 16


def test_no_more_steps_match_layers_than_there_are(base, tmp_path, capsys):
    assert run(base, tmp_path / "run", *SELF, "--match-steps", "7") == 2
    assert "--match-steps=7 exceeds steps=6" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
