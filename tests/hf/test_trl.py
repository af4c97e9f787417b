"""TRL trains our models, by the name of a folder, packed or without padding, without mixing documents."""

import pytest
import torch
from builders import decoder as tiny

from dape.models.byte_tokenizer import byte_tokenizer

pytestmark = [
    pytest.mark.slow,  # the import of TRL alone takes seconds
    pytest.mark.filterwarnings("ignore"),
]
TEXTS = [f"{number} cats sat on the mat. " * (1 + number % 3) for number in range(12)]
WAYS = {
    "padded": {},
    "packed": {"packing": True},
    "packed, documents cut": {"packing": True, "packing_strategy": "wrapped"},
    "without padding": {"padding_free": True, "max_length": None},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tiny("dape1x3-kerple", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_is_trained_by_its_name(way, folder, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    settings = {"max_length": 96, "max_steps": 6, "learning_rate": 3e-3, "logging_steps": 1, "bf16": False}
    settings |= {"per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    loading = {"trust_remote_code": True, "dtype": "float32"}
    arguments = trl.SFTConfig(output_dir=str(tmp_path), model_init_kwargs=loading, **settings | WAYS[way])
    data = datasets.Dataset.from_dict({"text": TEXTS})
    trainer = trl.SFTTrainer(model=str(folder), args=arguments, train_dataset=data)
    assert type(trainer.model).__name__ == "DapeForCausalLM"
    seen = []
    trainer.model.register_forward_pre_hook(lambda _, args, given: seen.append(given), with_kwargs=True)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    num_documents = documents_apart(trainer.model.eval(), seen[0])
    together = way in ("packed", "without padding")
    assert num_documents > len(seen[0]["input_ids"]) if together else num_documents == 4
    trainer.save_model()
    assert (tmp_path / "dape_from_package.py").exists()


def documents_apart(model, given):
    """Number of documents in a batch, having checked that its logits are those of each document alone."""
    ids, places = given["input_ids"], given.get("position_ids")
    real = given.get("attention_mask", torch.ones_like(ids)).bool()
    whole = {name: given[name] for name in ("attention_mask", "position_ids") if given.get(name) is not None}
    with torch.no_grad():
        together = model(ids, use_cache=False, **whole).logits
        num_documents = 0
        for row in range(len(ids)):
            begins = [0] if places is None else (places[row][real[row]] == 0).nonzero().flatten().tolist()
            tokens, logits = ids[row][real[row]], together[row][real[row]]
            for start, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
                alone = model(tokens[None, start:end], use_cache=False).logits[0]
                torch.testing.assert_close(logits[start:end], alone, rtol=1e-3, atol=1e-4)
                num_documents += 1
    return num_documents
