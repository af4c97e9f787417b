"""The comparison: methods × seeds × lengths, trained alike, evaluated on the same tokens. Needs `dape[lab]`."""

from dape.compare.comparing import compare, exit_code
from dape.compare.settings import Comparison, by_recipe

__all__ = ["Comparison", "by_recipe", "compare", "exit_code"]
