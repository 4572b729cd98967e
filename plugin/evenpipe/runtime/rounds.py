"""The order in which links are opened: in rounds, of which there are as many for 64 stages as for 8."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import TypeVar

__all__ = ["LinkT", "rounds"]

LinkT = TypeVar("LinkT", bound=tuple[str, int, int])


def rounds(links: Sequence[LinkT]) -> list[list[LinkT]]:
    """Deal `links` (kind, source rank, target rank) out so that in a round no rank has to do with two others.

    A greedy edge colouring: all links of two ranks, both ways, are in the first round that is free for both. A rank
    with n peers is busy in n rounds, so there are fewer than 2n: neighbours, wrapped around or not, and a partner make
    3 peers, and at most 4 rounds in the order of `evenpipe.schedule.links`, however many stages there are. So no rank
    is behind more than 3 other pairs in a row; one after the other along the model, the last would be behind p - 2.

    No deadlock if each rank opens its links round by round, in the order given here, even where opening one blocks both
    of its ends: that is one order of all links. Of those that are not open, the first in that order is the next one at
    either of its ends, so both are in it, and it opens.
    """
    busy: dict[int, set[int]] = defaultdict(set)
    of_pair: dict[frozenset[int], int] = {}
    dealt: dict[int, list[LinkT]] = defaultdict(list)
    for link in links:
        _, source, target = link
        pair = frozenset((source, target))
        if pair not in of_pair:
            of_pair[pair] = next(number for number in count() if number not in busy[source] | busy[target])
            busy[source].add(of_pair[pair])
            busy[target].add(of_pair[pair])
        dealt[of_pair[pair]].append(link)
    return [dealt[number] for number in sorted(dealt)]
