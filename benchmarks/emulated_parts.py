"""Parts of a plan whose nodes sleep: what they keep, recompute and swap goes through the runtime as a model's does."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from emulation import Accelerator
from torch import Tensor

from evenpipe.partition.profile import Profile
from evenpipe.partition.search.plan import Stage
from evenpipe.runtime.recompute_swap import PLAIN_CALLER, Keeper, Keeping, NodeCaller
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.schedule import Unit
from evenpipe.stage_code.keeping import keeping_of

__all__ = ["EmulatedPart", "PartStage", "scaled"]

_BOUNDARY = 1024


def scaled(profile: Profile, time: float, nbytes: float) -> Profile:
    """The same nodes, taking `time` times as long, and storages of `nbytes` times the bytes, but none of them empty."""
    nodes = (
        node.model_copy(update={"forward_ms": time * node.forward_ms, "backward_ms": time * node.backward_ms})
        for node in profile.nodes
    )
    storages = (
        one.model_copy(update={"nbytes": max(1, round(nbytes * one.nbytes)) if one.nbytes else 0})
        for one in profile.storages
    )
    return profile.model_copy(update={"nodes": tuple(nodes), "storages": tuple(storages)})


class _Work(NamedTuple):
    """Neighbouring nodes as one: what they take of the device, and the storages that they make, read and save.

    `kept`: made ones that their own backward needs, `given`: made ones that others read; both may name one.
    """

    node: int
    accelerator: Accelerator
    forward_ms: float
    backward_ms: float
    made: tuple[tuple[int, int], ...]
    read: tuple[int, ...]
    saved: tuple[int, ...]
    given: tuple[int, ...]


class _Nodes(torch.autograd.Function):
    """Takes the device's time both ways. Each storage carries its own and the micro-batch's number to the backward."""

    @staticmethod
    def forward(ctx: Any, work: _Work, chain: Tensor, *read: Tensor) -> tuple[Tensor, ...]:
        number = int(chain[0].item())
        work.accelerator.give(work.forward_ms)
        there = dict(zip(work.read, read, strict=True))
        there |= {one: torch.full((nbytes,), _mark(one, number), dtype=torch.uint8) for one, nbytes in work.made}
        ctx.work, ctx.number = work, number
        ctx.save_for_backward(*(there[one] for one in work.saved))
        given = tuple(there[one] for one in work.given)
        ctx.mark_non_differentiable(*given)
        ctx.set_materialize_grads(False)
        return chain.view_as(chain), *given

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: None) -> tuple[Any, ...]:
        work, number = ctx.work, ctx.number
        for one, tensor in zip(work.saved, ctx.saved_tensors, strict=True):
            if tensor.numel() and not tensor[0] == tensor[-1] == _mark(one, number):
                raise RuntimeError(f"micro-batch {number}: storage {one} came back with what is not its own")
        work.accelerator.give(work.backward_ms)
        return None, gradient, *(None for _ in work.read)


def _mark(storage: int, micro_batch: int) -> int:
    return (7 * storage + micro_batch) % 251


class EmulatedPart(torch.nn.Module):
    """A part of a plan on this profile. Nodes of which the runtime need know nothing are computed as one.

    `host_gbps`: of the profile's bytes and milliseconds.
    """

    def __init__(self, profile: Profile, part: Stage, host_gbps: float, accelerator: Accelerator) -> None:
        super().__init__()
        order = range(part.first_node, part.last_node + 1)
        given = [one for one in part.swap_storages if profile.storages[one].producer < part.first_node]
        self.keeping: Keeping = keeping_of(profile, part, host_gbps, order, {}, given)
        chosen = self.keeping.swapped | self.keeping.dropped
        alone = set(self.keeping.nodes)
        alone.update(node for number in chosen for node in profile.storages[number].savers)
        runs = [[*run] for _, run in groupby(order, lambda node: node if node in alone else -1)]
        self._works = _works(profile, runs, accelerator)
        self._received = tuple(
            (number, one.nbytes)
            for number, one in enumerate(profile.storages)
            if one.producer < part.first_node and any(node in order for node in (*one.users, *one.savers))
        )

    def forward(self, chain: Tensor, keep: NodeCaller = PLAIN_CALLER) -> Tensor:
        """`chain` carries the micro-batch's number from part to part, and order from node to node."""
        number = int(chain[0].item())
        there = {
            one: keep.given(one, torch.full((nbytes,), _mark(one, number), dtype=torch.uint8))
            for one, nbytes in self._received
        }
        for work in self._works:
            read = [there[one] for one in work.read]
            chain, *given = keep(work.node, _Op(work), chain, *read)
            there |= dict(zip(work.given, given, strict=True))
        return chain.clone()


class _Op:
    """The operation of a node: called with what it reads."""

    def __init__(self, work: _Work) -> None:
        self._work = work

    def __call__(self, chain: Tensor, *read: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = _Nodes.apply(self._work, chain, *read)
        return found


def _works(profile: Profile, runs: Sequence[Sequence[int]], accelerator: Accelerator) -> list[_Work]:
    makes, reads, saves = (defaultdict[int, list[int]](list) for _ in range(3))
    for number, one in enumerate(profile.storages):
        makes[one.producer].append(number)
        for node in {*one.users, *one.savers} - {one.producer}:
            reads[node].append(number)
        for node in one.savers:
            saves[node].append(number)
    works = []
    for run in runs:
        made = [number for node in run for number in makes[node]]
        read = sorted({number for node in run for number in reads[node]}.difference(made))
        saved = {number for node in run for number in saves[node]}
        outside = [n for n in made if not {*profile.storages[n].users, *profile.storages[n].savers} <= set(run)]
        works.append(
            _Work(
                run[0],
                accelerator,
                sum(profile.nodes[node].forward_ms for node in run),
                sum(profile.nodes[node].backward_ms for node in run),
                tuple((number, profile.storages[number].nbytes) for number in made),
                tuple(read),
                tuple(sorted(saved)),
                tuple(n for n in made if n in outside or n not in saved),
            )
        )
    return works


class PartStage(ModuleStage):
    """One stage's compute of an emulated part; an action ends when the device is done with it."""

    def __init__(self, part: EmulatedPart, accelerator: Accelerator, is_last: bool, keeper: Keeper | None) -> None:
        super().__init__(
            [part],
            Edges.alike(torch.empty(_BOUNDARY)),
            first=lambda micro_batch: torch.full((_BOUNDARY,), float(micro_batch), requires_grad=True),
            loss=lambda _, output: output.sum(),
            loss_chunk=0 if is_last else None,
        )
        self._part, self._accelerator, self._keeper = part, accelerator, keeper

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """What `ModuleStage` gives, when the device has computed it."""
        outputs = super().forward(unit, inputs)
        self._accelerator.settle()
        return outputs

    def compute(self, unit: Unit, inputs: list[Tensor] | None) -> Tensor:
        """Through the keeper, where the part recomputes or swaps."""
        chain = self._first(unit.micro_batch) if inputs is None else inputs[0]
        if self._keeper is None:
            return self._part(chain)
        with self._keeper.forward(unit, self._part.keeping, lambda _: contextlib.nullcontext()) as keep:
            return self._part(chain, keep)

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """What `ModuleStage` gives, when the device has computed it."""
        found = super().backward(unit, gradients)
        self._accelerator.settle()
        return found
