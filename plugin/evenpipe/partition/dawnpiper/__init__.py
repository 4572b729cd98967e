"""DawnPiper's own algorithm: where the paper's equations, algorithms and sections are in the code.

| DawnPiper | here |
|---|---|
| §3.1, Equation 2: copies of a stage | `copies.copies_of`; a stage's peak, `problem.Problem.peaks` |
| Equation 1, T_x; §3.2, bytes of nodes | `evenpipe.partition.costs.matrices.Costs` |
| §4.1–4.2, minimise max(T_x + T_x^moo) within M | `problem.Problem`; a stage's share of it, `problem.Problem.cell` |
| Theorem 4.1, between ρ_cb and ρ_mb | `bipar`; condition 2, `evenpipe.partition.search.plan.Plan.warnings` |
| Algorithm 1, AdjacentPartition and BiPar | `bipar.bipar`, with the paper's line numbers |
| CompMemBalPartition | `balance.Balance.compute_cut` and `memory_cut` |
| §4.3, MemOpt: Capuchin's FreeTime and MSPS | `capuchin.fit` |
| Algorithm 2 | `balance.Balance.memory_cuts`; as printed, `benchmarks/rivals/algorithm_2.py` |
| Appendix B.2, communication | `balance.quiet` |
"""
