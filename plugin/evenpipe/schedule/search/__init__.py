"""Orders searched for the times and the memory of one run. What comes out is a schedule like any other.

costs: the document of times, bytes and caps. problem: the same as arrays. starts: ``listing``, ``blocks``, and all known
schedules; ``justifying`` closes their gaps, ``annealing`` moves single actions, ``clock`` tells what an order takes.
"""
