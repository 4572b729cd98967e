"""Orders searched for the times and the memory of one run. What comes out is a schedule like any other.

costs: the document of times, bytes and caps. problem: the same as arrays. clock: what an order takes. listing, blocks:
orders to start from, beside known ones. justifying: closes their gaps. annealing: moves single actions, by changing,
which keeps an order on the clock. search: all of it. evicting: caps that partner stages share, and the transfers of an
order for them.
"""
