"""What computing bytes again takes at least: a bound for many ranges at once, so that few need to be weighed."""

from __future__ import annotations

import numpy as np

from evenpipe.partition.search.costs import Numbers
from evenpipe.partition.search.ranges import Graph

__all__ = ["RecomputedBytes"]

#: Classes of nodes by the milliseconds that a byte takes to be computed again.
_CLASSES = 24
#: A node on the way to more than so many is left out.
_MANY = 8


class RecomputedBytes:
    """The bytes that nodes make and that backwards need, by what they take to be had again.

    Whatever a node makes, it runs again in full for any of it; and so do those before it of which nothing is ever
    saved, unless what they make is kept instead, between pieces (`Division`): where that is no less than all that it
    leads to, to keep the latter takes no more. A node on the way to several counts in equal parts for each: whichever
    of them run again, the parts are no more than it takes once. So no choice takes less than parts of the nodes that
    take least a byte, in their order. Where a range starts behind a node on the way, that node's parts are taken off
    again.
    """

    def __init__(self, graph: Graph) -> None:
        count = len(graph.makes)
        made = np.array(
            [sum(graph.nbytes[one] for one in makes if graph.is_saved[one]) for makes in graph.makes], float
        )
        takes_ms = np.array(graph.forward_ms)
        split = np.zeros(count + 2)
        leads_to: list[set[int]] = [set() for _ in range(count)]
        for node in reversed(range(count)):
            for one in graph.makes[node]:
                users = {user for user in graph.users[one] if user > node}
                through = set[int]().union(*({user} if made[user] else leads_to[user] for user in users))
                if sum(made[user] for user in through) <= graph.nbytes[one]:
                    leads_to[node] |= through
            if made[node] == 0 and 0 < len(leads_to[node]) <= _MANY:
                each_ms = graph.forward_ms[node] / len(leads_to[node])
                for user in leads_to[node]:
                    takes_ms[user] += each_ms
                    split[node + 1] += each_ms
                    split[user + 1] -= each_ms
        self._split = np.cumsum(split)
        nodes = np.flatnonzero(made)
        dear = takes_ms[nodes] / made[nodes]
        order = np.argsort(dear, kind="stable")
        parts = [part for part in np.array_split(order, _CLASSES) if len(part)]
        by_class = np.zeros((len(parts), count + 1))
        for number, part in enumerate(parts):
            by_class[number, nodes[part] + 1] = made[nodes[part]]
        self._by_class = by_class.cumsum(axis=1)
        self._ms_a_byte = [float(dear[part].min()) for part in parts]

    def least_ms(self, nbytes: Numbers, starts: Numbers, stops: Numbers, else_ms: float) -> Numbers:
        """For ranges starts × stops of nodes, to save `nbytes` in each; a byte by any other way takes `else_ms`."""
        left, found = nbytes, np.zeros_like(nbytes)
        for before, ms_a_byte in zip(self._by_class, self._ms_a_byte, strict=True):
            if ms_a_byte >= else_ms or not left.any():
                break
            there = before[stops][None, :] - before[starts][:, None]
            taken = np.minimum(left, np.maximum(there, 0.0))
            found += taken * ms_a_byte
            left = left - taken
        found = np.maximum(found - self._split[starts][:, None], 0.0)
        return found + np.multiply(left, else_ms, out=np.zeros_like(left), where=left > 0)
