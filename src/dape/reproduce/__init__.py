"""The papers' tables, each as one experiment in data, at three scales. Needs `dape[lab]`."""
