"""Search: the fastest runs that fit a cluster, what each costs in memory, and why the others are not taken."""
