"""A tokenizer without a vocabulary: token b is byte b, as a Hugging Face tokenizer."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 tokens, one a byte of UTF-8; any text goes in and comes out unchanged."""
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in _names()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Byte 0 does not occur in text: it begins documents, ends them and pads batches.
    name = dict(_names())[0]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=name,
        eos_token=name,
        pad_token=name,
        clean_up_tokenization_spaces=False,
    )


def _names() -> list[tuple[int, str]]:
    """The printable character that stands for each byte in the ByteLevel scheme of the tokenizers library."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [(byte, chr(byte if byte in visible else 256 + hidden.index(byte))) for byte in range(256)]
