"""The cost model of a stage: its time and bytes, what it saves, and what it takes to compute that again."""
