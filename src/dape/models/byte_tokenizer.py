"""A tokenizer without a vocabulary: token b is byte b, as a Hugging Face tokenizer."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of 256 tokens, one per byte of UTF-8; any text survives a round trip."""
    # Byte 255 occurs in no UTF-8 text: its token begins documents, ends them and pads batches.
    end = "<|endoftext|>"
    names = [*(name for _, name in _names()[:255]), end]
    tokenizer = Tokenizer(models.BPE(vocab={name: byte for byte, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        clean_up_tokenization_spaces=False,
    )


def _names() -> list[tuple[int, str]]:
    """The printable character of each byte in the ByteLevel scheme of the tokenizers library."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [(byte, chr(byte if byte in visible else 256 + hidden.index(byte))) for byte in range(256)]
