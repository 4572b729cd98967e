"""Pair-adjacent placement: which physical slot runs which (pipeline, data, tensor) coordinate (BPipe, section 3.5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

__all__ = ["Coordinate", "Launch", "NotPlacedError", "Placement", "place"]


class Coordinate(NamedTuple):
    """One process's place in the model: pipeline stage, data-parallel rank, tensor-parallel rank."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Placement:
    """``slots[g]`` is the coordinate that runs on physical slot g = node * gpus_per_node + local; see :func:`place`.

    p stages, t tensor-parallel, d data-parallel. More ranks that are to stay together count as tensor-parallel, if
    Megatron's order has them next to each other (context-parallel ones, say), and as data-parallel otherwise.
    """

    p: int
    t: int
    d: int
    gpus_per_node: int
    slots: tuple[Coordinate, ...]

    def rank_of_slot(self, g: int) -> int:
        """Return the rank of slot g's coordinate in Megatron's default order (tp-cp-ep-dp-pp, tensor fastest)."""
        pp, dp, tp = self.slots[g]
        return tp + self.t * (dp + self.d * pp)

    def apply(self, environ: MutableMapping[str, str]) -> int:
        """Replace RANK, so far this process's slot, by the rank of the coordinate placed there; return the new rank.

        To be called once, before ``init_process_group``, with the environment that the launcher made (``os.environ``).
        LOCAL_RANK stays, so it keeps naming the device. Slot 0 keeps rank 0, so MASTER_ADDR stays right.

        Raises:
            ValueError: the launcher's variables are missing or describe other nodes than this placement.
        """
        try:
            slot, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        except KeyError as missing:
            raise ValueError(f"{missing.args[0]} is not set: start the processes with torchrun to place them") from None
        if world != len(self.slots):
            raise ValueError(
                f"WORLD_SIZE is {world} but the placement is for {self.p} stages x {self.t} tensor-parallel x {self.d} "
                f"data-parallel = {len(self.slots)} processes: start that many"
            )
        per_node = min(self.gpus_per_node, world)
        local_world = int(environ.get("LOCAL_WORLD_SIZE", per_node))
        if local_world != per_node:
            raise ValueError(
                f"LOCAL_WORLD_SIZE is {local_world} but the placement is for {per_node} processes on each node: "
                f"start {per_node} on each, or place for {local_world} GPUs per node"
            )
        local = int(environ.get("LOCAL_RANK", slot % per_node))
        if local != slot % per_node:
            raise ValueError(
                f"RANK {slot} with LOCAL_RANK {local} does not count slots node by node ({per_node} on each): "
                "apply the placement once, to the launcher's own RANK"
            )
        rank = self.rank_of_slot(slot)
        environ["RANK"] = str(rank)
        return rank


class NotPlacedError(Exception):
    """Ranks are not to be placed, or cannot be: why, and what to do."""


class Launch(NamedTuple):
    """A process as torchrun describes it, by the lower-case names of its variables."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Launch:
        """Read from the environment that torchrun made. Raises NotPlacedError where a variable is missing."""
        missing = [name.upper() for name in cls._fields if name.upper() not in environ]
        if missing:
            raise NotPlacedError(f"{missing[0]} is not set: start the processes with torchrun, or set what it sets")
        return cls(*(int(environ[name.upper()]) for name in cls._fields))

    @property
    def counts_node_by_node(self) -> bool:
        """Return whether all nodes have as many processes, numbered node by node, as far as this one can tell."""
        full = self.group_world_size * self.local_world_size == self.world_size
        return full and self.group_rank * self.local_world_size + self.local_rank == self.rank


def place(p: int, t: int, d: int, gpus_per_node: int) -> Placement:
    """Place p stages x t tensor-parallel x d data-parallel ranks on nodes of ``gpus_per_node`` GPUs.

    Tensor ranks stay together on one node, an evictor sits next to its acceptor, and a pipeline is placed before the
    next data-parallel one (Figures 5(b) and 6). As few pairs as the node size allows cross nodes: none if 2t divides
    ``gpus_per_node``.

    Raises:
        ValueError: a size below 1, or processes that neither fit one node nor fill whole nodes.
    """
    for name, value in (("stages", p), ("tensor-parallel", t), ("data-parallel", d), ("GPUs per node", gpus_per_node)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    world = p * t * d
    if world <= gpus_per_node:
        groups_per_node = p * d
    else:
        if gpus_per_node % t:
            raise ValueError(
                f"{gpus_per_node} GPUs per node do not hold whole tensor-parallel groups of {t}: "
                f"choose a tensor-parallel size that divides {gpus_per_node}"
            )
        if world % gpus_per_node:
            step = gpus_per_node // gcd(p * t, gpus_per_node)
            raise ValueError(
                f"{p} stages x {t} tensor-parallel x {d} data-parallel = {world} GPUs do not fill nodes of "
                f"{gpus_per_node}: choose a data-parallel size that is a multiple of {step}, or other stages"
            )
        groups_per_node = gpus_per_node // t
    order = _group_order(p, d, groups_per_node)
    return Placement(p, t, d, gpus_per_node, tuple(Coordinate(pp, dp, tp) for pp, dp in order for tp in range(t)))


def _group_order(p: int, d: int, groups_per_node: int) -> list[tuple[int, int]]:
    """Return the (stage, data rank) of each tensor-parallel group, in slot order.

    Pipeline by pipeline: its pairs, then the middle stage that an odd p leaves without a partner. A pair that would be
    cut by a node's end lets a middle stage, if need be of a later pipeline, take the node's last place (a node of one
    place cuts every pair anyhow and is never partly filled, so there the order stays).
    """
    order: list[tuple[int, int]] = []
    middles = deque((p // 2, dp) for dp in range(d if p % 2 else 0))
    for dp in range(d):
        for s in range(p // 2):
            places_left = -len(order) % groups_per_node
            if places_left == 1 and middles:
                order.append(middles.popleft())
            order += [(s, dp), (p - 1 - s, dp)]
        if middles and middles[0] == (p // 2, dp):
            order.append(middles.popleft())
    return order
