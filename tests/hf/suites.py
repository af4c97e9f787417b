"""transformers' own suites on our models; not collected by default, because the suites are fetched, not committed.

git clone --depth 1 --branch vVERSION https://github.com/huggingface/transformers FOLDER   # the version that is installed
SUITES=FOLDER METHOD=dape1x3-kerple python -m pytest -o addopts= -W default -p no:cacheprovider tests/hf/suites.py

EXCEPTIONS says which of their tests do not apply, and why.
"""

import copy
import os
import sys
import unittest
from typing import ClassVar

import pytest
import torch

FOLDER = os.environ.get("SUITES")
if not FOLDER:
    pytest.skip("SUITES names no clone of transformers", allow_module_level=True)
sys.path.insert(0, FOLDER)

from tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from tests.test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask  # noqa: E402

from dape import parse_method  # noqa: E402
from dape.models import DapeConfig, DapeForCausalLM, DapeModel  # noqa: E402
from dape.models.decoder import DapeForSequenceClassification, DapeForTokenClassification  # noqa: E402

METHOD = os.environ.get("METHOD", "dape1x3-kerple")
# Name of a test, or how it begins → why it does not apply.
EXCEPTIONS: dict[str, str] = {
    "test_custom_4d_attention_mask": "a tree of tokens: keys with gaps between them, which are refused",
    "test_retain_grad_hidden_states_attentions": "weights are computed beside the output: no gradient flows through",
}
EARLIER_QUERIES = {  # of methods that convolve over queries: mta, dape3x3 …
    "test_assisted_decoding": "assistants take a padding token that was generated for padding between tokens, which is "
    "refused: convolutions would reach across it",
}


class Tester:
    """A tiny model and its inputs, as the suites ask for them."""

    def __init__(self, parent: unittest.TestCase) -> None:
        self.parent, self.is_training = parent, True
        self.batch_size, self.seq_length, self.vocab_size = 4, 7, 99
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = 32, 2, 4

    def get_config(self) -> DapeConfig:
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        sizes = {name: getattr(self, name) for name in names} | {"score_width": 8}
        return DapeConfig(method=METHOD, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        mask = random_attention_mask([self.batch_size, self.seq_length])
        if reads_earlier_queries():
            # Padding between tokens is refused, as convolutions over queries would reach across it; generate() takes
            # padding's id within a prompt for padding.
            ids, mask = ids.clamp(min=1), mask.sort(-1).values
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


def reads_earlier_queries() -> bool:
    return bool(parse_method(METHOD).build_scores(4, width=8).program().earlier_rows)


class DapeModelTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (DapeModel, DapeForCausalLM)
    all_model_classes += (DapeForSequenceClassification, DapeForTokenClassification)
    all_generative_model_classes = (DapeForCausalLM,)
    pipeline_model_mapping: ClassVar[dict] = {}
    model_tester_class = Tester
    has_attentions = True

    def setUp(self) -> None:
        for name, reason in (EXCEPTIONS | (EARLIER_QUERIES if reads_earlier_queries() else {})).items():
            if self._testMethodName.startswith(name):
                self.skipTest(reason)
        self.model_tester = Tester(self)

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        """After a key's own features come those of earlier queries, or of the encoding's state, where there are any."""
        keys_alone = copy.copy(past_key_values)
        keys_alone.layers = [copy.copy(layer) for layer in past_key_values.layers]
        for layer in keys_alone.layers:
            layer.keys = layer.keys[..., : config.hidden_size // config.num_attention_heads]
        super()._check_past_key_values_for_generate(batch_size, keys_alone, seq_length, config)

    def prepare_config_and_inputs_for_generate(self, batch_size: int = 2):
        """Prompts padded on the left: from one that ends in padding, generate() counts positions on from the padding's,
        which ours refuses as no packing, and a compiled step cannot leave out padding between tokens."""
        config, inputs = super().prepare_config_and_inputs_for_generate(batch_size)
        mask = torch.ones_like(inputs["attention_mask"])
        for row in range(len(mask)):
            mask[row, : row % 3] = 0
        return config, {**inputs, "attention_mask": mask}


def of_models_with_a_loss(name: str):
    """One of their tests of training, without the base model: theirs are left out by a table of names."""
    test = getattr(ModelTesterMixin, name)

    def narrowed(self: DapeModelTest) -> None:
        self.all_model_classes = (DapeForCausalLM,)
        test(self)

    return narrowed


for name in [name for name in dir(ModelTesterMixin) if name.startswith("test_training")]:
    setattr(DapeModelTest, name, of_models_with_a_loss(name))
