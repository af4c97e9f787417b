"""The lab: runs → one table → differences → figures, tables, a page. Needs `dape[lab]`.

runs         a training and its evaluation as one object, with an identity
experiment   `run_experiment`: a list of runs → their table, here or on a cluster; run_job: the worker process
equal_time   steps in equal training time; display: progress; environment: the machine
compare      `dape compare` and `sweep`: settings → runs → Comparison
comparison   `Comparison`: verdict, tables, figures and page of the tables; load and merge
tables, figures, page   what is shown
tasks, solving   generated tasks: runs of the same kind; training and accuracy
api          `dape.train`, `dape.evaluate`

The table and its differences are `dape.evaluation.table`; the statistics `dape.evaluation.statistics`; a metric is an entry
of `dape.evaluation.metrics`.
"""
