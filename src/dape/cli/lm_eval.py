"""`dape lm-eval MODEL …`: the lm-evaluation-harness on a trained or retrofitted model."""

from __future__ import annotations

import re
import sys

from lm_eval.__main__ import cli_evaluate

from dape.devices import find_device
from dape.harness import register

HELP = """usage: dape lm-eval MODEL [options of the harness]

Evaluate a model on tasks of the lm-evaluation-harness, local ones or the hub's.

  dape lm-eval runs/a --tasks brackets.yaml --output-path results
  dape lm-eval runs/a --tasks lambada_openai hellaswag --batch-size 16
  dape lm-eval runs/a --tasks ruler --model-args max_length=8192 tokenizer=bytes

MODEL is a run's folder, a folder or a name of Hugging Face, or an adapter's.
Options are those of the harness, `lm-eval run --help`; words of a name may be
joined by dashes. A task file can run code (`!function`): only use files that
you trust."""


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & {*arguments}:
        print(HELP)
        return 0
    model, *rest = arguments
    words = [re.sub(r"(?<=\w)-", "_", word) if word.startswith("--") else word for word in rest]
    if "--device" in words[:-1]:
        # The harness would silently use the CPU.
        find_device(words[words.index("--device") + 1])
    register()
    ours = ["run", "--model", "dape", "--model_args", f"pretrained={model}"]
    # The harness parses the words of the process.
    sys.argv = ["dape lm-eval", *ours, *words]
    cli_evaluate()
    return 0
