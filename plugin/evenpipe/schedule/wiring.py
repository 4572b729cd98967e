"""Which action waits for which: all that lowering finds out, as numbers of actions (see Table), -1 being none.

A message is known by the number of the action that receives it.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from evenpipe.schedule.kinds import COMPUTE, EVICT, KINDS, RECEIVING, LinkKind
from evenpipe.schedule.places import Places
from evenpipe.schedule.residency import LEAVING
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.table import Column, by_kind, following
from evenpipe.schedule.topology import Link, partner

__all__ = ["Disagreement", "Wiring", "senders"]

_KINDS: tuple[LinkKind, ...] = ("backward", "evict", "forward", "load", "swap in", "swap out")
_COMPUTE = by_kind(lambda row: row.letter in COMPUTE)
_RECEIVING = by_kind(lambda row: row.receives)
_STAYING = by_kind(lambda row: row.link is not None and not LEAVING[ord(row.letter)])
#: Kinds that take a unit as a transfer has left it: they wait until that transfer is complete. An eviction does not: it
#: takes other memory than the swap before it.
_AFTER_TRANSFER = by_kind(
    lambda row: (
        row.letter != EVICT and any(state == KINDS[letter].leaves for state in row.takes for letter in RECEIVING)
    )
)


class Disagreement(NamedTuple):
    """A link of which the ends name different messages: from the ``number``-th on, which one sends, the other takes."""

    link: Link
    number: int
    sends: int
    takes: int


class _Ports:
    """Where messages go. A port is a kind of link and the part of the model that takes what comes by it, as a number.

    ``sends[kind, part]`` and ``takes[kind, part]`` are the ports of an action on a unit of that part; -1: none.
    ``link`` is the link that a port is on: a number in ``links``, which are in order.
    """

    def __init__(self, places: Places) -> None:
        stages, parts = places.stages, len(places.order)
        self.sends, self.takes = (np.full((128, parts), -1, np.int64) for _ in range(2))
        links: dict[int, Link] = {}
        for row in KINDS.values():
            code = ord(row.letter)
            kind: LinkKind = row.link or ("forward" if row.direction > 0 else "backward")
            base = _KINDS.index(kind) * parts
            for stage, chunk in places.order:
                part = stage * places.chunks + chunk
                if row.link is not None:
                    self.sends[code, part] = base + part if row.sends else -1
                    self.takes[code, part] = base + part if row.receives else -1
                    other = stage if row.sends and row.receives else partner(stage, stages)
                    if not row.guest:
                        links[base + part] = Link(kind, *((stage, other) if row.sends else (other, stage)))
                elif row.direction and (before := places.neighbour(stage, chunk, -row.direction)) is not None:
                    self.takes[code, part] = base + part
                    self.sends[code, before.stage * places.chunks + before.chunk] = base + part
                    links[base + part] = Link(kind, before.stage, stage)
        self.links = sorted(set(links.values()))
        numbers = {link: number for number, link in enumerate(self.links)}
        self.link = np.full(len(_KINDS) * parts, -1, np.int32)
        for port, link in links.items():
            self.link[port] = numbers[link]
        self.parts = parts


class _Ends(NamedTuple):
    """The ports by which actions send and take, -1 where they do not; and from which action what they take comes."""

    ports: _Ports
    sends: Column
    takes: Column
    senders: Column


def _ends(schedule: Schedule) -> _Ends:
    table, ports = schedule.table, _Ports(schedule.places)
    part = np.where(table.evictor >= 0, table.evictor, table.stage) * schedule.chunks + table.chunk
    sends, takes = ports.sends[table.kind, part], ports.takes[table.kind, part]
    micro_batches = schedule.micro_batches * schedule.batches
    sender = np.full(len(_KINDS) * ports.parts * micro_batches, -1, np.int32)
    sending, taking = np.flatnonzero(sends >= 0), np.flatnonzero(takes >= 0)
    sender[sends[sending] * micro_batches + table.micro_batch[sending]] = sending
    senders = np.full(len(sends), -1, np.int32)
    senders[taking] = sender[takes[taking] * micro_batches + table.micro_batch[taking]]
    return _Ends(ports, sends.astype(np.int32), takes.astype(np.int32), senders)


def senders(schedule: Schedule) -> Column:
    """Per action, the one on whose result, or whose end of a transfer, it depends."""
    return _ends(schedule).senders


class Wiring:
    """Of each action:

    senders: the action that sends what it takes: a result, or what is transferred. gives: the one that takes what it
    sends. computes: whether it is compute. remote: whether what it takes comes by a link, and not from the same stage.
    after: the transfer of its unit that must be complete before it. settles: the earlier action of which the result
    must have arrived before it. gone: how many of its stage's ``departures`` must be complete before it.
    moves: the message that it starts to move on a link. link_of: which of ``links`` the message that it takes is on.
    """

    def __init__(self, schedule: Schedule) -> None:
        table = schedule.table
        self.schedule = schedule
        self._ports, self._sends, self._takes, self.senders = _ends(schedule)
        count = len(self.senders)
        self.computes = _COMPUTE[table.kind] > 0
        self.gives = np.full(count, -1, np.int32)
        taking = np.flatnonzero(self.senders >= 0)
        self.gives[self.senders[taking]] = taking
        self.remote = self._remote(self._takes)
        # Of a group's results all are under way per link, and one more: what was sent before them has arrived before
        # the next is computed, so that a stage keeps few results alive for its sends.
        ahead = schedule.group_size + 1
        self.after = np.where(
            (_AFTER_TRANSFER[table.kind] > 0) & (following(_STAYING[table.kind], table.previous) > 0),
            table.previous,
            -1,
        )
        self.settles = np.full(count, -1, np.int32)
        sent = self._by_link(self._sends)
        sent = sent[self.computes[sent]]
        link = self._ports.link[self._sends[sent]]
        full = np.flatnonzero(link[ahead:] == link[:-ahead])
        self.settles[sent[full + ahead]] = sent[full]
        self.gone = np.concatenate([held.gone for held in schedule.residencies])
        self.moves = np.where(self.computes & ~self._remote(self._sends), -1, self.gives)
        arriving = np.flatnonzero(_RECEIVING[table.kind])
        self.moves[arriving] = arriving
        self.links = self._ports.links
        self.link_of = np.where(self._takes >= 0, self._ports.link[self._takes], -1)

    def departures(self, stage: int) -> Column:
        """The transfers with which units leave a stage, in order."""
        rows = self.schedule.table.of(stage)
        found: Column = rows.start + np.flatnonzero(LEAVING[self.schedule.table.kind[rows]])
        return found

    @property
    def departed(self) -> Column:
        """The message of the last departure that must be complete before each action, and need not be before others."""
        rows = [slice(*ends) for ends in pairwise(self.schedule.table.first.tolist())]
        messages = (np.append(self.gives[self.departures(stage)], -1) for stage in range(len(rows)))
        sent = [sent[self.gone[those] - 1] for those, sent in zip(rows, messages, strict=True)]
        return np.concatenate([np.where(np.diff(last, prepend=-1), last, -1) for last in sent])

    def leaving(self, stage: int) -> tuple[Column, Column, Column]:
        """Of a stage's departures: the message, the stage that the unit belongs to, and its chunk."""
        table, departures = self.schedule.table, self.departures(stage)
        owner = np.where(table.evictor[departures] >= 0, table.evictor[departures], stage)
        return self.gives[departures], owner, table.chunk[departures]

    def waits(self, stage: int) -> tuple[Column, Column, Column, Column]:
        """Of each action of a stage: how many departures it waits for, and up to three messages after these."""
        rows = self.schedule.table.of(stage)
        inputs = np.where((self.computes & self.remote)[rows], np.arange(rows.start, rows.stop), -1)
        departing = np.diff(self.gone[rows], prepend=0)
        return departing, self.after[rows], inputs, following(self.gives, self.settles[rows])

    def left_over(self, stage: int) -> list[int]:
        """What a stage received or sent and did not see complete, but for departures, as it then completes it."""
        table = self.schedule.table
        rows = table.of(stage)
        actions = np.arange(rows.start, rows.stop)
        staying = actions[_STAYING[table.kind[rows]] > 0]
        found: list[int] = staying[~np.isin(staying, self.after[rows])].tolist()
        sent = actions[(_COMPUTE[table.kind[rows]] > 0) & self._remote(self._sends[rows])]
        links, left = self._ports.link[self._sends[sent]], ~np.isin(sent, self.settles[rows])
        for link in dict.fromkeys(links.tolist()):
            found += sent[left & (links == link)].tolist()
        return found

    @cached_property
    def disagreement(self) -> Disagreement | None:
        """The first link, in their order, whose first-in-first-out ends do not name the same messages."""
        sent, taken = self._by_link(self._sends), self._by_link(self._takes)
        if np.array_equal(self.senders[taken], sent):
            return None
        sending, taking = (self._ports.link[ports[at]] for ports, at in ((self._sends, sent), (self._takes, taken)))
        for number, link in enumerate(self._ports.links):
            ends = sent[sending == number].tolist(), taken[taking == number].tolist()
            for index, (out, into) in enumerate(zip_longest(*ends, fillvalue=-1)):
                if into < 0 or self.senders[into] != out:
                    return Disagreement(link, index, out, into)
        return None

    def unit(self, action: int, *, sent: bool) -> tuple[int, int]:
        """Micro-batch and chunk of what an action sends or takes, as the receiver names them."""
        port = (self._sends if sent else self._takes)[action]
        return int(self.schedule.table.micro_batch[action]), int(port % self._ports.parts % self.schedule.chunks)

    def _remote(self, ports: Column) -> Column:
        """Whether what goes by these ports goes from stage to stage."""
        remote = np.array([link.source != link.target for link in self._ports.links] + [False])
        return remote[np.where(ports >= 0, self._ports.link[ports], -1)]

    def _by_link(self, ports: Column) -> Column:
        """The actions that send, or take, by a link between stages: link by link, in the order of each stage."""
        actions = np.flatnonzero(self._remote(ports)).astype(np.int32)
        return actions[np.argsort(self._ports.link[ports[actions]].astype(np.uint16), kind="stable")]
