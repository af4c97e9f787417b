"""`python -m dape`, which is also how torchrun starts it."""

import sys

from dape.cli import main

sys.exit(main())
