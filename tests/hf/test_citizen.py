"""What a Hugging Face user expects of any causal language model, of ours."""

import json

import pytest
import torch
from builders import decoder as tiny
from builders import llama, quiet_arguments
from processes import python
from transformers import AutoModelForCausalLM, Trainer

import dape
from dape.models import export


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export(tiny(), tmp_path_factory.mktemp("model"), with_code=True)


DAPE_LAST = """
import sys
from transformers import AutoModelForCausalLM
assert "dape" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(model).__module__)
model.save_pretrained(sys.argv[2])
import dape.models
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[2])).__name__)
"""


def test_a_saved_folder_loads_by_its_name_alone(tmp_path):
    """As tools do that are given a folder and import nothing of ours."""
    tiny().save_pretrained(tmp_path / "model")
    assert len(list((tmp_path / "model").glob("*.py"))) == 1
    said = python("-c", DAPE_LAST, tmp_path / "model", tmp_path / "again", HF_HOME=str(tmp_path / "home"))
    assert said.split() == ["dape.models.decoder", "DapeForCausalLM"]
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "again")]
    assert configs[0] == configs[1]
    assert (tmp_path / "again" / "dape_from_package.py").exists()


WITHOUT_DAPE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dape":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
import torch
from transformers import AutoModelForCausalLM
ids = torch.arange(12)[None]
for folder in sys.argv[1:]:
    # What such a process saves carries the code on.
    for target in (folder + "-again", None):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        model(ids, labels=ids).loss.backward()
        print(*model.generate(ids, max_new_tokens=4, do_sample=False)[0].tolist())
        if target:
            model.save_pretrained(target)
            folder = target
"""


def test_a_folder_with_code_loads_and_is_saved_where_dape_is_not_installed(folder, tmp_path):
    retrofitted = dape.retrofit(llama(eos_token_id=None), "dape1x3-kerple", zero_init=False)
    adapted = export(retrofitted, tmp_path / "retrofitted", with_code=True)
    said = python("-c", WITHOUT_DAPE, folder, adapted, HF_HOME=str(tmp_path)).splitlines()
    models = [AutoModelForCausalLM.from_pretrained(folder), retrofitted]
    told = [model.generate(torch.arange(12)[None], max_new_tokens=4, do_sample=False) for model in models]
    assert said == [" ".join(map(str, ids[0].tolist())) for ids in told for _ in range(2)]
    copied = folder.with_name(f"{folder.name}-again").glob("*.py")
    assert {path.name for path in copied} == {path.name for path in folder.glob("*.py")}


def test_the_entry_of_the_code_names_every_file(folder):
    """transformers 5.4 copies what the entry imports itself and no more."""
    from transformers.dynamic_module_utils import get_relative_imports

    entry = folder / "dape_models_decoder.py"
    others = {path.name for path in folder.glob("*.py") if path != entry}
    assert {f"{name}.py" for name in get_relative_imports(entry)} == others


def test_sampling_repeats_under_its_seed_and_assistants_change_nothing():
    # Prompt lookup of some versions needs an end of texts.
    model, helper = tiny(eos_token_id=39), tiny(num_hidden_layers=1, eos_token_id=39)
    ids = torch.randint(0, 40, (1, 6))
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(model.generate(ids, max_new_tokens=8, do_sample=True, top_k=20))
    assert torch.equal(*draws)
    greedy = model.generate(ids, max_new_tokens=8, do_sample=False)
    assisted = model.generate(ids, max_new_tokens=8, do_sample=False, assistant_model=helper)
    assert torch.equal(assisted, greedy)
    by_lookup = model.generate(ids, max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=2)
    assert torch.equal(by_lookup, greedy)
    early = model.generate(ids, max_new_tokens=8, do_sample=False, assistant_early_exit=1)
    assert torch.equal(early, greedy)
    assert model.config.num_hidden_layers == 2


def test_beams_are_the_same_with_any_cache():
    model, ids = tiny(), torch.randint(0, 40, (2, 6))
    options = {"max_new_tokens": 5, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    told = model.generate(ids, use_cache=False, **options)
    assert told.shape == (4, 11)
    assert torch.equal(model.generate(ids, **options), told)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), told)
    torch.manual_seed(0)
    drawn = model.generate(ids, **{**options, "do_sample": True})
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids, **{**options, "do_sample": True}), drawn)


@pytest.mark.parametrize("method", ["dape1x3-kerple", "dape1x3-rope", "dape1x3-fire", "cope"])
def test_a_mask_with_holes_is_as_if_those_tokens_were_not_there(method):
    model, ids = tiny(method=method).double(), torch.randint(0, 40, (2, 10))
    mask = torch.ones_like(ids)
    mask[0, [2, 3, 6, 9]] = 0
    kept = mask[0].bool()
    whole = model(ids, attention_mask=mask, output_attentions=True)
    alone = model(ids[:1, kept], output_attentions=True)
    torch.testing.assert_close(whole.logits[0, kept], alone.logits[0])
    torch.testing.assert_close(whole.logits[1:], model(ids[1:]).logits)
    torch.testing.assert_close(whole.attentions[1][0][:, kept][:, :, kept], alone.attentions[1][0])
    cache = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True).past_key_values
    rest = model(ids[:, 5:], attention_mask=mask, past_key_values=cache, use_cache=True).logits
    real = mask[:, 5:].bool()
    torch.testing.assert_close(rest[real], whole.logits[:, 5:][real])


def test_embeddings_are_resized():
    model, ids = tiny(), torch.randint(0, 40, (1, 6))
    before = model(ids).logits
    model.resize_token_embeddings(50, mean_resizing=False)
    assert (model.config.vocab_size, model.lm_head.weight.shape[0]) == (50, 50)
    torch.testing.assert_close(model(ids).logits[..., :40], before)
    assert model(torch.tensor([[45]])).logits.shape == (1, 1, 50)


def test_tied_embeddings_stay_tied_through_the_disk(tmp_path):
    tiny(tie_word_embeddings=True).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed.weight


def test_a_model_of_another_format_is_refused(tmp_path):
    tiny().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"dape_format": 1', '"dape_format": 7'))
    with pytest.raises(ValueError, match="has format 7, this version of dape reads format 1: load it with"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_dtype_and_device_map(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, device_map="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert model(torch.arange(5)[None]).logits.dtype == torch.float16


def test_trainer_trains_it_and_resumes(tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 40, (8, 12))]
    how = {"max_steps": 6, "save_steps": 3, "logging_steps": 1, "learning_rate": 1e-2}
    arguments = quiet_arguments(tmp_path, gradient_checkpointing=True, **how)
    trainer = Trainer(model=tiny(), args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    again = Trainer(model=tiny(), args=arguments, train_dataset=rows)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], value, rtol=1e-3, atol=1e-4)


def test_smoothed_labels_are_the_next_tokens(tmp_path):
    """Trainer shifts labels only for classes in transformers' table of causal models."""
    arguments = quiet_arguments(tmp_path, label_smoothing_factor=0.1)
    model, ids = tiny(), torch.randint(0, 40, (2, 9))
    loss = Trainer(model=model, args=arguments).compute_loss(model, {"input_ids": ids, "labels": ids})
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_texts_and_tokens_are_classified(padding, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    ids, real = torch.randint(1, 40, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    hidden = slice(0, 3) if padding == "left" else slice(4, 7)
    ids[0, hidden], real[0, hidden] = 0, 0
    shown = real[0].bool()
    tiny(num_labels=3, pad_token_id=0).save_pretrained(tmp_path)
    for auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
        torch.manual_seed(0)
        model = auto.from_pretrained(tmp_path, num_labels=3).eval()
        together = model(ids, attention_mask=real).logits
        alone = model(ids[:1, shown]).logits
        kept = together[0] if auto is AutoModelForSequenceClassification else together[0, shown]
        torch.testing.assert_close(kept, alone[0], rtol=1e-4, atol=1e-5)
        labels = torch.ones(together.shape[:-1], dtype=torch.long)
        model(ids, attention_mask=real, labels=labels).loss.backward()
