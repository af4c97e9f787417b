"""The lab: from a grid of methods to runs, rows, statistics, tables, figures and pages. Needs `dape[lab]`.

In the order of the data; CONTRIBUTING.md says where new things go.

experiments, kinds/          a grid as data; how each kind of experiment runs, its table and its figure
execute, runner, worker      which runs are left; jobs, processes and clusters; one job
evaluations, solving         language models evaluated by length; generated tasks trained and tested
pace, environment, display   interleaved step times; the machine; progress
records, folders    the schema of results, as a file and as a pandas frame; experiments with their results
stats, accuracies, curves    estimates, seeds and paired differences of losses and of accuracies; values by length
selection, rules, evidence   what a claim is decided on; rules; evidence to verdicts
claims, paper                verdicts on all claims; the numbers that a paper prints
tables, figures, report/   what is shown
compare, api                 `dape.compare` and its command; the functions of `dape`

A run is a training and its evaluation, a job is a run to be done, an item of a plan says which; rows are what was
measured of a run. `Trained` is a method trained in one setting, over all seeds.
"""
