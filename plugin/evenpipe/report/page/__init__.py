"""One self-contained HTML page of a run, a simulation, a partition or a plan."""
