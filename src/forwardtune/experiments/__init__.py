"""Fair comparisons of methods, as files that anyone can run, stop, resume and read.

spec         what is compared: a frozen description in TOML
plan         the spec as a list of runs, each identified by the hash of its description
runner       one run, resumable through its ledger
evaluations  the log of a run's evaluations while it is under way
comparison   all runs of a plan, in worker processes
sweep        many rates on the budget of one run, by successive halving
result       what a run came to, typed
events       what is told while runs are made
provenance   the code and machine that a result comes from
store        one result file per run
evidence     results that stay, in one file per comparison
scoring      results as best rates, means, intervals, ratios
intervals    bootstrap and Student's intervals over seeds
summary      scores in words
report/      scores as HTML, PNG, Markdown and CSV

The data and models that runs are made on are in `forwardtune.tasks`.
"""
