"""`dape retrofit`: from a pretrained model to a retrofitted one, interrupted and continued, from any text."""

import json
from types import MappingProxyType

import numpy as np
import pandas as pd
import pytest
import torch
from builders import decoder, llama_of_bytes, quiet_arguments
from processes import SERVER
from transformers import BertConfig, BertLMHeadModel, LlamaForCausalLM, Trainer

import dape
from dape import cli, loading
from dape.data import ByteTokenizer, Tokens
from dape.evaluation import losses_by_length
from dape.evaluation.table import make_table, perplexities, read_table
from dape.loading import load_causal_lm
from dape.retrofitting import adapt, parameter_groups
from dape.retrofitting.adapt import WithSinks
from dape.retrofitting.matching import LayerMatching
from dape.retrofitting.report import Report
from dape.retrofitting.tuning import Tuning, skipped_positions


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Llama of bytes, with a tokenizer beside it."""
    folder = llama_of_bytes(tmp_path_factory.mktemp("model") / "base")
    text = "".join(f"The cat number {n} sat on mat {n % 7}. " for n in range(2000))
    (folder.parent / "texts.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def texts(base):
    return str(base.parent / "texts.txt")


def run(base, out, *more):
    arguments = ["--steps", "6", "--batch-size", "4", "--windows", "4", "--log-every", "1"]
    if "--method" not in more:
        arguments += ["--method", "dape1x3-kerple"]
    if "--corpus" not in more:
        arguments += ["--corpus", str(base.parent / "texts.txt")]
    return cli.main(["retrofit", str(base), "--out", str(out), *arguments, "--device", "cpu", *more])


def weights(out):
    model = dape.load_retrofitted(out / "model")
    return model.state_dict()


def test_text_of_its_own(base, tmp_path, capsys):
    assert run(base, tmp_path / "run", "--distill", "0.5") == 0
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
    assert run(base, tmp_path / "whole") == 0
    whole = adapt.fit
    third = {"on_step": lambda record: record["step"] == 3}
    monkeypatch.setattr(adapt, "fit", lambda *args, **options: whole(*args, **options, **third))
    assert run(base, tmp_path / "parts") == 1
    assert not (tmp_path / "parts" / "model").exists()
    monkeypatch.undo()
    assert run(base, tmp_path / "parts") == 0
    parts = weights(tmp_path / "parts")
    for name, value in weights(tmp_path / "whole").items():
        torch.testing.assert_close(parts[name], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--method", "kerpel"], "unknown method"),
        (["--last", "20"], "is more than the shortest"),
        (["--last", "4", "--lengths", "2,8"], "is more than the shortest"),
        (["--match-steps", "3", "--train-length", "32"], "the base, which teaches here, reads 16 tokens"),
        (["--skip-length", "32", "--distill", "1"], "a teacher reads no gaps"),
        (["--skip-length", "8"], "is less than train_length=16"),
        (["--match-steps", "7"], "--match-steps=7 exceeds steps=6"),
    ],
)
def test_mistakes_are_said_before_the_work(base, tmp_path, more, message, capsys):
    assert run(base, tmp_path / "run", *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_other_settings_want_another_folder(base, tmp_path, capsys):
    assert run(base, tmp_path / "run") == 0
    assert run(base, tmp_path / "run", "--method", "kerple") == 2
    assert "another folder" in capsys.readouterr().err
    assert run(base, tmp_path / "run", "--steps", "7") == 2
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


@pytest.mark.parametrize("name", ["whole", "adapter", "base"])
def test_commands_load_a_model_as_what_it_is(name, base, tmp_path, capsys):
    """Whole folders and adapters, never their base alone in silence; a model of others as well."""
    model = LlamaForCausalLM.from_pretrained(base)
    if name != "base":
        dape.retrofit(model, "dape1x3-kerple", zero_init=False)
        dape.save_adapter(model, tmp_path / "adapter")
    model.save_pretrained(tmp_path / ("base" if name == "base" else "whole"))
    ByteTokenizer().save(tmp_path / ("base" if name == "base" else "whole"))
    folder, text = tmp_path / name, tmp_path / "text.txt"
    text.write_text("The cat sat on the mat. " * 40)
    ids = torch.tensor([ByteTokenizer().encode(text.read_text())[:33]])
    with torch.no_grad():
        logits = model.eval()(ids[:, :-1], use_cache=False).logits[0]
        again = load_causal_lm(folder)(ids[:, :-1], use_cache=False).logits[0]
    torch.testing.assert_close(again, logits)
    out = tmp_path / "results"
    sizes = ["--lengths", "32", "--last", "8", "--windows", "1000"]
    options = [*sizes, "--corpus", str(text), "--out", str(out), "--device", "cpu"]
    assert cli.main(["eval", f"hf:{folder}", *options]) == 0
    [results] = out.glob("*.csv.gz")
    rows = read_table(results).query("metric == 'loss' and slice == 'all'")
    tokens = Tokens.of([np.array(ByteTokenizer().encode(text.read_text()))])
    expected = losses_by_length(model, tokens, [32], last=8, windows=1000).at(32).value
    assert rows["sum"].sum() / rows["count"].sum() == pytest.approx(expected, rel=1e-4)
    capsys.readouterr()
    assert cli.main(["generate", str(folder), "--prompt", "The", "--tokens", "5"]) == 0
    said = "a window of 16" if name == "base" else "retrofitted with dape1x3-kerple"
    assert said in capsys.readouterr().err
    seen = ["--text", "The cat", "--lengths", "4", "--out", str(tmp_path / "seen")]
    assert cli.main(["inspect", str(folder), *seen]) == 0
    assert (tmp_path / "seen" / "index.html").exists()
    suite = ["--tasks", "niah_single_1", "--lengths", "256", "--examples", "2"]
    assert cli.main(["suite", str(folder), *suite, "--out", str(tmp_path / "suite")]) == 0


def test_a_gguf_file_is_a_model_like_any_other(base, tmp_path, monkeypatch):
    """transformers marks what it dequantised as quantised, and refuses to cast it."""

    def read(source, **options):
        model = LlamaForCausalLM.from_pretrained(base)
        model.is_quantized = True
        return model

    monkeypatch.setattr(loading, "pretrained", lambda name: (str(base), {"gguf_file": "model.gguf"}))
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", read)
    load_causal_lm(tmp_path / "model.gguf").float().save_pretrained(tmp_path)


@pytest.mark.parametrize("method", ["dape1x3-kerple", "fox"])
def test_matching_teaches_each_layer_by_itself(base, method):
    model, teacher = (LlamaForCausalLM.from_pretrained(base) for _ in range(2))
    torch.manual_seed(0)
    dape.retrofit(model, method)
    matching, ids = LayerMatching(model, teacher), torch.randint(250, (8, 16))
    before = matching.loss(ids)
    assert before > 1e-4
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


def test_matching_then_distilling(base, tmp_path):
    """The loss of the text is higher than that of matching, which is no divergence."""
    assert run(base, tmp_path / "run", "--match-steps", "3", "--distill", "0.5") == 0
    model = LlamaForCausalLM.from_pretrained(base)
    dape.retrofit(model, "kerple")
    with pytest.raises(ValueError, match="teacher"):
        Tuning(model, np.arange(100), train_length=16, batch_size=2, match_steps=3)


def test_trainer_takes_the_groups_of_parameters(tmp_path, base):
    model = dape.retrofit(LlamaForCausalLM.from_pretrained(base), "dape1x3-kerple")
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-4, added_rate=50.0))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 250, (8, 12))]
    arguments = quiet_arguments(tmp_path, max_steps=2, lr_scheduler_type="constant")
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    # Adam moves by the rate, whatever the gradient is.
    moved = {name: (value - before[name]).abs().max().item() for name, value in model.named_parameters()}
    added = max(value for name, value in moved.items() if ".score_processor.project." in name)
    own = max(moved[name] for name in moved if "score_processor" not in name and "position" not in name)
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


def test_the_base_trained_on_stands_beside_the_retrofit(base, texts):
    """The decisive baseline has as many steps on as many tokens, and is cut to the window."""
    model = LlamaForCausalLM.from_pretrained(base)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    how = {"steps": 8, "batch_size": 2, "train_length": 32, "control": True, "windows": 8, "device": "cpu"}
    adapted = dape.adapt(model, "kerple", texts, **how)
    steps = {arm: result.steps for arm, result in adapted.results.items()}
    assert steps == {("base trained on", 0): 8, ("retrofit", 0): 8}
    assert len({result.tokens for result in adapted.results.values()}) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    report = adapted.report
    own, cut = report.loss("base trained on", 16), report.loss("base", 16)
    assert own.value != cut.value
    gain = report.gain("kerple", 64)
    assert gain.value == pytest.approx(own.value - report.loss("kerple", 64).value, abs=1e-6)
    assert gain.low < gain.value < gain.high
    # What costs nothing stands first.
    labels = [row[0] for row in report.rows()]
    assert labels[:4] == ["base, cut to 16", "base trained on, cut to 16", "base", "kerple"]


def test_seeds_are_trained_side_by_side_and_decide_together(base, texts, tmp_path, monkeypatch):
    model = LlamaForCausalLM.from_pretrained(base)
    how = {"steps": 2, "batch_size": 2, "windows": 4, "control": True, "lengths": "16,32", "device": "cpu"}
    monkeypatch.setattr(adapt.multiprocessing, "get_context", lambda kind: SERVER)
    both = dape.adapt(model, "kerple", texts, seeds=2, jobs=2, out=tmp_path / "both", **how)
    one = dape.adapt(model, "kerple", texts, seed=0, out=tmp_path / "one", **how)
    assert both.report.gain("kerple", 32).seeds == 2
    assert set(both.table["seed"]) == {0, 1}
    first = both.table[both.table["seed"] == 0].reset_index(drop=True)
    pd.testing.assert_frame_equal(
        first.drop(columns="corpus"), one.table.drop(columns="corpus"), check_exact=False, rtol=1e-5
    )
    # A seed more leaves those that are trained as they are, and their losses are known.
    measured, whole = [], adapt.losses_of_windows
    monkeypatch.setattr(adapt, "losses_of_windows", lambda *args: measured.append(args[3]) or whole(*args))
    more = dape.adapt(model, "kerple", texts, seeds=3, out=tmp_path / "both", **how)
    assert sorted(measured) == [16, 16, 32]
    assert len(more.results) == 6
    assert more.report.gain("kerple", 32).seeds == 3


def test_untrained_scalings_stand_beside_it(base, texts):
    model = LlamaForCausalLM.from_pretrained(base)
    how = {"steps": 2, "windows": 4, "device": "cpu", "lengths": "16,64", "untrained": "rope-scalings"}
    adapted = dape.adapt(model, "kerple", texts, **how)
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


def test_by_default_the_rotation_is_stretched_and_convolved(base, texts, tmp_path):
    """To the longest length of the table, in windows of four times the base's and as many tokens a step as 16 of those."""
    model = LlamaForCausalLM.from_pretrained(base)
    how = {"steps": 1, "windows": 4, "lengths": "16,64", "device": "cpu"}
    adapted = dape.adapt(model, texts=texts, out=tmp_path / "out", **how)
    [method] = adapted.report.retrofits
    assert method == "dape1x3-rope[scaling=yarn,factor=4,original_length=16]"
    settings = json.loads((tmp_path / "out" / "retrofit.json").read_text())["settings"]
    assert (settings["train_length"], settings["batch_size"]) == (64, 4)
    assert adapted.results["retrofit", 0].tokens == 16 * 16
    # The same command continues with the same settings.
    assert dape.adapt(model, texts=texts, out=tmp_path / "out", **how).report.retrofits == [method]


METHODS = ["rope", "nope", "kerple", "dape-kerple", "dape1x3-rope", "dape1x3-kerple", "keyshift-kerple"]
METHODS += [f"rope[scaling={kind},factor=4,original_length=16]" for kind in ("dynamic", "yarn")]
BASELINES = dict.fromkeys(METHODS, MappingProxyType({})) | {
    "rope in windows of 4 ×": {"train_length": 64},
    "PoSE, rope[scaling=linear,factor=4]": {"skip_length": 64},
    "PoSE, rope": {"skip_length": 64},
}


@pytest.mark.parametrize(
    ("name", "own"), [*((name, False) for name in BASELINES), ("nope", True), ("PoSE, rope", True)]
)
def test_every_baseline_can_be_tuned(name, own, base, texts):
    """DroPE is "nope": the positions are dropped, and the model is tuned at its own length."""
    method = name.removeprefix("PoSE, ").partition(" in ")[0]
    model = LlamaForCausalLM.from_pretrained(base)
    if own:
        model = decoder("rope", vocab_size=257, num_hidden_layers=1, max_position_embeddings=16)
    how = {"steps": 2, "windows": 2, "lengths": "16,64", "device": "cpu", **BASELINES[name]}
    adapted = dape.adapt(model, method, texts, tokenizer=str(base), **how)
    assert adapted.report.loss(adapted.report.retrofits[0], 64).known
    assert adapted.results["retrofit", 0].steps == 2


def test_skipped_positions_have_one_gap_and_one_document(base):
    """A token after the gap still sees those before it."""
    positions = skipped_positions(500, 16, 64, np.random.default_rng(0))
    steps = positions.diff(dim=1)
    assert positions[:, 0].eq(0).all()
    assert positions.max() == 63
    assert ((steps > 1).sum(1) <= 1).all()
    assert (steps >= 1).all()
    assert (steps > 1).any(1).sum() > 400
    model = LlamaForCausalLM.from_pretrained(base)
    task = Tuning(model, np.arange(500) % 250, train_length=16, batch_size=8, skip_length=64)
    batch = task.batch(0)
    seen = []
    model.model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    task.loss(model, batch)
    with torch.no_grad():
        hidden = model.model(**seen[0]).last_hidden_state
        batch[:, 0] += 1
        changed = model.model(**{**seen[0], "input_ids": batch[:, :-1]}).last_hidden_state
    assert (hidden - changed)[:, -1].abs().amax(-1).gt(0).all()


def test_a_bidirectional_base_is_said_to_be(texts):
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    bert = BertLMHeadModel(BertConfig(vocab_size=257, max_position_embeddings=32, **small)).eval()
    with pytest.raises(ValueError, match=r'cannot retrofit "bert": it is bidirectional'):
        dape.adapt(bert, "kerple", texts, device="cpu")


def test_sinks_are_the_first_tokens_of_what_is_cut():
    tokens, ends = Tokens.of([np.arange(60)]), np.array([41])
    windows = WithSinks(ends, np.zeros(1, int), 10)
    assert windows.ids(tokens, 40).tolist() == [[0, 1, 2, 3, *range(34, 41)]]
    assert windows.ids(tokens, 10).tolist() == [list(range(30, 41))]


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


@pytest.mark.parametrize("trains", ["all", "attention", "added"])
def test_a_run_of_ours_is_a_base_too(trains, texts, tmp_path):
    sizes = {"train_length": 16, "hidden_size": 32, "num_heads": 4, "num_layers": 1, "batch_size": 2}
    how = {"corpus": texts, "method": "rope", "steps": 2, "device": "cpu"}
    trained = dape.train(out=str(tmp_path / "run"), **how, **sizes)
    assert run(trained.folder, tmp_path / "out", "--trains", trains, "--corpus", texts) == 0
    after, before = load_causal_lm(tmp_path / "out" / "model"), trained.model().state_dict()
    assert after.config.method == "dape1x3-kerple"
    state = after.state_dict()
    moved = {name for name in before if name in state and not torch.equal(state[name], before[name])}
    assert bool(moved) == (trains != "added")
    assert all(".attention." in name for name in moved) == (trains != "all")
