"""The cost model of a stage: its time and bytes, the storages that it saves, and the cost of computing them again."""
