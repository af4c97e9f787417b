"""DAPE V2: experiments, claims, printed numbers, results."""
