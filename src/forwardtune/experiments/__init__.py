"""Fair comparisons of methods, as files that anyone can run, stop, resume and read.

spec        what is compared: a frozen description in TOML
plan        the spec as a list of runs, each known by the hash of its description
workloads/  data, networks and base weights
runner      one run, resumable through its ledger
comparison  all runs of a plan, in worker processes
store       one result file a run
scoring     results as best rates, means, intervals, ratios
report/     scores as HTML, PNG, Markdown and CSV
"""
