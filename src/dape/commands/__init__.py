"""Subcommands of `dape`, one file each."""
