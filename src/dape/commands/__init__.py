"""The subcommands of `dape` that are not a library of their own."""
