"""Memory and time of a run before it runs, and the search for the best. Pure Python.

From descriptions to an estimate: :mod:`descriptions` (models, devices, clusters, frameworks), :mod:`run` (how model and
batch are divided), :mod:`operations` (what each part computes, moves and keeps), :mod:`stage_bytes` (memory of every
stage), :mod:`kernels` and :mod:`iteration` (times), :mod:`counted_flops` (rates), :mod:`estimate`, :mod:`uncertainty`,
:mod:`advice`; :mod:`arguments` reads a run's own flags, and :mod:`flag_needs` names those without effect.
:mod:`search` takes the fastest run that fits; :mod:`fit` changes a run that is there. :mod:`parallel_pipelines` is
PipeDream-2BW's Algorithm 1. :mod:`grouped` and :mod:`group_memory` are Ada-Grouper's candidates, by what was measured.
"""
