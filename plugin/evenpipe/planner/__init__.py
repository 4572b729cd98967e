"""Memory and time of a run before it runs, and the search for the best. Pure Python.

From room `descriptions` (models, devices, clusters, frameworks) to an estimate: :mod:`run` (how model and
batch are divided), :mod:`possible` (what no run can be), :mod:`operations` (what each part computes, moves and keeps),
:mod:`stage_bytes` (memory of every stage), :mod:`kernels` and :mod:`iteration` (times), :mod:`counted_flops` (rates),
:mod:`estimate`, :mod:`uncertainty`, :mod:`advice`; :mod:`arguments` reads a run's own flags.
:mod:`search` takes the fastest run that fits.
:mod:`grouped` and :mod:`group_memory` are Ada-Grouper's candidates, by what was measured.
"""
