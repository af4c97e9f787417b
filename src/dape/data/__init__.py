"""Corpora, tokenizers and packed tokens. Needs `dape[lab]`."""

from dape.data.chunks import BadText
from dape.data.corpora import Corpus, find_corpus
from dape.data.preparation import prepare
from dape.data.tokenizers import ByteTokenizer, SubwordTokenizer, Tokenizer, load_tokenizer, train_bpe
from dape.data.tokens import TokenData, Tokens, open_data, verify

__all__ = [
    "BadText",
    "ByteTokenizer",
    "Corpus",
    "SubwordTokenizer",
    "TokenData",
    "Tokenizer",
    "Tokens",
    "find_corpus",
    "load_tokenizer",
    "open_data",
    "prepare",
    "train_bpe",
    "verify",
]
