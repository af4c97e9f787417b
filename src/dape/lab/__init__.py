"""The lab: from a grid of methods to runs, rows, statistics, tables, figures and pages. Needs `dape[lab]`.

records      the schema: results as a file and as a pandas frame          a new metric: a row in kinds/KIND.py
experiments  a grid as data                                               a new kind: a file in kinds/
runner       jobs, processes, clusters                                    a new launcher: a class in LAUNCHERS
stats        estimates, seeds, paired differences
curves, tables, figures, report/                                          a new figure: `figure` in kinds/KIND.py
claims       evidence and verdicts                                        a new claim: papers/PAPER/claims.py
compare      `dape.compare` and its command
"""
