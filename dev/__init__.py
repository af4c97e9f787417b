"""The demonstration and development tools, not part of the wheel: `python -m dev.NAME --help` from a clone."""
