"""Fit: the changes to a run that is there which make it fit a memory, and those that make it fast."""
