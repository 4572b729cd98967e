"""Which action waits for which, as numbers of actions (see :class:`Table`); -1 is none."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from evenpipe.schedule.actions import EVICT, KINDS, RECEIVING, LinkKind, Unit
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.table import LEAVING, Column, by_kind, following
from evenpipe.schedule.topology import Link, Message, Places, partner

__all__ = ["Disagreement", "Wiring"]

_LINK_KINDS: tuple[LinkKind, ...] = ("backward", "evict", "forward", "load", "swap in", "swap out")
_STAYING = by_kind(lambda row: row.link is not None and not LEAVING[ord(row.letter)])
#: Kinds that take a unit as a transfer has left it: they wait until that transfer is complete. An eviction does not: it
#: takes other memory than the swap before it.
_AFTER_TRANSFER = by_kind(
    lambda row: (
        row.letter != EVICT and any(state == KINDS[letter].leaves for state in row.takes for letter in RECEIVING)
    )
)


class Disagreement(NamedTuple):
    """A link whose ends name different units from the ``number``-th message on; None where an end has no more.

    ``taker``: the action that takes; -1 where there is none.
    """

    link: Link
    number: int
    sent: Unit | None
    taken: Unit | None
    taker: int


class _Ports:
    """Ends of messages. A port is a kind of link and the part of the model that takes what comes by it, as a number.

    ``sends[kind, part]`` and ``takes[kind, part]`` are the ports of an action on a unit of that part; -1: none.
    ``link`` is the link that a port is on: a number in ``links``, which are in order.

    A forward gives its result to the part after it, a backward or input gradient to the part before. Two consecutive
    parts on one stage have a message too, on a link that joins the stage with itself.
    """

    def __init__(self, places: Places) -> None:
        stages, parts = places.stages, len(places.order)
        self.sends, self.takes = (np.full((128, parts), -1, np.int64) for _ in range(2))
        links: dict[int, Link] = {}
        for row in KINDS.values():
            code = ord(row.letter)
            kind: LinkKind = row.link or ("forward" if row.direction > 0 else "backward")
            base = _LINK_KINDS.index(kind) * parts
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
        self.link = np.full(len(_LINK_KINDS) * parts, -1, np.int32)
        for port, link in links.items():
            self.link[port] = numbers[link]
        self.count = len(self.link)


class Wiring:
    """All that actions wait for. A message is known by the number of the action that takes it."""

    def __init__(self, schedule: Schedule) -> None:
        table, self._ports = schedule.table, _Ports(schedule.places)
        self.schedule = schedule
        self.links = self._ports.links
        part = np.where(table.evictor >= 0, table.evictor, table.stage) * schedule.chunks + table.chunk
        self._sends = self._ports.sends[table.kind, part].astype(np.int32)
        self._takes = self._ports.takes[table.kind, part].astype(np.int32)
        self.computes = table.computes

    @cached_property
    def senders(self) -> Column:
        """Per action, the one that sends what it takes: a result, or what is transferred."""
        micro_batch = self.schedule.table.micro_batch.astype(np.int64)
        micro_batches = self.schedule.micro_batches * self.schedule.batches
        sending, taking = np.flatnonzero(self._sends >= 0), np.flatnonzero(self._takes >= 0)
        sender = np.full(self._ports.count * micro_batches, -1, np.int32)
        sender[self._sends[sending] * micro_batches + micro_batch[sending]] = sending
        senders = np.full(len(self._sends), -1, np.int32)
        senders[taking] = sender[self._takes[taking] * micro_batches + micro_batch[taking]]
        return senders

    @cached_property
    def gives(self) -> Column:
        """Per action, the one that takes what it sends."""
        taking = np.flatnonzero(self.senders >= 0)
        gives = np.full(len(self.senders), -1, np.int32)
        gives[self.senders[taking]] = taking
        return gives

    @cached_property
    def remote(self) -> Column:
        """Per action, whether what it takes comes by a link from another stage."""
        return self._remote(self._takes)

    @cached_property
    def link_of(self) -> Column:
        """Per action, on which of ``links`` the message is that it takes."""
        return np.where(self._takes >= 0, self._ports.link[self._takes], -1)

    @cached_property
    def after(self) -> Column:
        """Per action, the transfer of its unit that must be complete before it."""
        table = self.schedule.table
        waits = (_AFTER_TRANSFER[table.kind] > 0) & (following(_STAYING[table.kind], table.previous) > 0)
        return np.where(waits, table.previous, -1)

    @cached_property
    def settles(self) -> Column:
        """Per action, the earlier action whose result must have arrived before it.

        Per link, all results of a group are under way, and one more: the results before them have arrived before the
        next is computed, so that a stage keeps few results alive for its sends.
        """
        ahead = self.schedule.group_size + 1
        sent = self._by_link(self._sends)
        sent = sent[self.computes[sent]]
        link = self._ports.link[self._sends[sent]]
        full = np.flatnonzero(link[ahead:] == link[:-ahead])
        settles = np.full(len(self._sends), -1, np.int32)
        settles[sent[full + ahead]] = sent[full]
        return settles

    @cached_property
    def gone(self) -> Column:
        """Per action, how many of its stage's ``departures`` must be complete before it."""
        return np.concatenate([held.gone for held in self.schedule.residencies])

    @cached_property
    def starts(self) -> Column:
        """Per action, the message that it starts to move: of compute its result, local ones too."""
        arriving = self.schedule.table.which(lambda row: row.receives)
        return np.where(arriving, np.arange(len(arriving), dtype=np.int32), self.gives)

    @cached_property
    def moves(self) -> Column:
        """Per action, the message that it starts to move on a link."""
        return np.where(self.computes & ~self._remote(self._sends), -1, self.starts)

    def departures(self, stage: int) -> Column:
        """Return the transfers with which units leave a stage, in order."""
        rows = self.schedule.table.of(stage)
        departures: Column = rows.start + np.flatnonzero(LEAVING[self.schedule.table.kind[rows]])
        return departures

    @property
    def departed(self) -> Column:
        """The message of the last departure that must be complete before each action, and need not be before others."""
        rows = [slice(*ends) for ends in pairwise(self.schedule.table.first.tolist())]
        messages = (np.append(self.gives[self.departures(stage)], -1) for stage in range(len(rows)))
        sent = [sent[self.gone[of_stage] - 1] for of_stage, sent in zip(rows, messages, strict=True)]
        return np.concatenate([np.where(np.diff(last, prepend=-1), last, -1) for last in sent])

    def leaving(self, stage: int) -> tuple[Column, Column, Column]:
        """Return, per departure of a stage, the message, the stage that the unit belongs to, and its chunk."""
        table, departures = self.schedule.table, self.departures(stage)
        owner = np.where(table.evictor[departures] >= 0, table.evictor[departures], stage)
        return self.gives[departures], owner, table.chunk[departures]

    def waits(self, stage: int) -> tuple[Column, Column, Column, Column]:
        """Return, per action of a stage, how many departures it waits for, and up to three messages after these."""
        rows = self.schedule.table.of(stage)
        inputs = np.where((self.computes & self.remote)[rows], np.arange(rows.start, rows.stop), -1)
        departing = np.diff(self.gone[rows], prepend=0)
        return departing, self.after[rows], inputs, following(self.gives, self.settles[rows])

    def left_over(self, stage: int) -> Column:
        """Return the messages, but for departures, that a stage has not seen complete at its end, in that order."""
        table = self.schedule.table
        rows = table.of(stage)
        actions = np.arange(rows.start, rows.stop)
        staying = actions[_STAYING[table.kind[rows]] > 0]
        left: list[int] = staying[~self._seen[0][staying]].tolist()
        sent = actions[self.computes[rows] & self._remote(self._sends[rows])]
        links, unsettled = self._ports.link[self._sends[sent]], ~self._seen[1][sent]
        for link in dict.fromkeys(links.tolist()):
            left += sent[unsettled & (links == link)].tolist()
        return self.starts[np.array(left, np.int64)]

    @cached_property
    def _seen(self) -> tuple[Column, Column]:
        """Per action, whether another of its stage waits for its transfer, and for its result."""
        seen = np.zeros((2, len(self._sends) + 1), bool)  # the last row is that of none, -1
        seen[0, self.after], seen[1, self.settles] = True, True
        return seen[0], seen[1]

    def messages(self, numbers: Column) -> list[Message | None]:
        """Return the messages of these numbers; None for -1. The chunk is the receiver's."""
        table = self.schedule.table
        columns = (column[numbers].tolist() for column in (self.link_of, table.micro_batch, table.chunk))
        return [
            Message(self.links[link], micro_batch, chunk) if number >= 0 else None
            for number, link, micro_batch, chunk in zip(numbers.tolist(), *columns, strict=True)
        ]

    @cached_property
    def disagreement(self) -> Disagreement | None:
        """The first link, in their order, whose first-in-first-out ends do not name the same messages."""
        sent, taken = self._by_link(self._sends), self._by_link(self._takes)
        if np.array_equal(self.senders[taken], sent):
            return None
        sending, taking = (self._ports.link[ports[at]] for ports, at in ((self._sends, sent), (self._takes, taken)))
        for number, link in enumerate(self.links):
            ends = sent[sending == number].tolist(), taken[taking == number].tolist()
            for index, (sender, taker) in enumerate(zip_longest(*ends, fillvalue=-1)):
                if taker < 0 or self.senders[taker] != sender:
                    units = self._unit(sender, self._sends), self._unit(taker, self._takes)
                    return Disagreement(link, index, *units, taker)
        return None

    def _unit(self, action: int, ports: Column) -> Unit | None:
        """Return the unit that an action sends or takes by its port, as the receiver names it."""
        chunk = ports[action] % len(self.schedule.places.order) % self.schedule.chunks
        return None if action < 0 else Unit(int(self.schedule.table.micro_batch[action]), int(chunk))

    def _remote(self, ports: Column) -> Column:
        """Return whether what goes by these ports goes from stage to stage."""
        remote = np.array([link.source != link.target for link in self.links] + [False])
        return remote[np.where(ports >= 0, self._ports.link[ports], -1)]

    def _by_link(self, ports: Column) -> Column:
        """Return the actions that send, or take, by a link between stages: link by link, in the order of each stage."""
        actions = np.flatnonzero(self._remote(ports)).astype(np.int32)
        return actions[np.argsort(self._ports.link[ports[actions]].astype(np.uint16), kind="stable")]
