"""A tokenizer without a vocabulary: token b is byte b, as a Hugging Face tokenizer."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of 256 tokens, one per byte of UTF-8; any text survives a round trip."""
    # Byte 255 occurs in no UTF-8 text: its token begins documents, ends them and pads batches.
    end = "<|endoftext|>"
    names = [*(name for _, name in sorted(bytes_to_unicode().items())[:255]), end]
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
