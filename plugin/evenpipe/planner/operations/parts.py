"""The parts of a pipeline: which blocks each stage, or model chunk, has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Final, Literal, NamedTuple

from evenpipe.planner.descriptions import Model
from evenpipe.planner.operations.attention import attention, mask_bytes
from evenpipe.planner.operations.ends import embedding, head, joined
from evenpipe.planner.operations.mlp import experts, mlp
from evenpipe.planner.operations.operation import Operation
from evenpipe.planner.operations.shard import Shard
from evenpipe.planner.run import Run

__all__ = ["Block", "Blocks", "Part", "parts_of"]

Block = Literal[
    "embedding",
    "layer",
    "kept layer",
    "expert layer",
    "kept expert layer",
    "second embedding",
    "further token",
    "head",
    "tied head",
    "further head",
]
Part = Mapping[Block, int]
"""How many blocks of each kind a part of the pipeline has."""

#: Blocks that whole-layer recomputation carries out again, keeping their input.
_RECOMPUTED: Final = frozenset({"layer", "expert layer", "further token"})
_WITH_ATTENTION: Final = _RECOMPUTED | {"kept layer", "kept expert layer"}


def parts_of(model: Model, run: Run) -> list[Part]:
    """Each part of the pipeline, in the order of the model. What MTP adds is with the last, unless the run says where.

    Where that is another stage than the embedding's, it has an embedding of its own, as Megatron's has; a tied head's
    copy is one already.
    """
    found: list[Counter[Block]] = []
    done = 0
    for layers in run.layers_of(model):
        again = layers if run.recomputed_layers is None else min(layers, run.recomputed_layers)
        first, end = done + again, done + layers
        experts, kept_experts = model.expert_layers(done, first), model.expert_layers(first, end)
        found.append(
            Counter(
                {
                    "layer": again - experts,
                    "expert layer": experts,
                    "kept layer": layers - again - kept_experts,
                    "kept expert layer": kept_experts,
                }
            )
        )
        done = end
    found[0]["embedding"] += 1
    found[-1]["tied head" if model.tied and run.stages == 1 else "head"] += 1
    if model.mtp_layers:
        where = len(found) - 1 if run.further_part is None else run.further_part
        found[where]["further token"] += model.mtp_layers
        found[where]["further head"] += model.mtp_layers
        shared = where % run.stages == 0 or (model.tied and where == len(found) - 1)
        found[where]["second embedding"] += not shared
    return [+one for one in found]


class Blocks:
    """The operations of each kind of block on one GPU."""

    def __init__(self, model: Model, run: Run) -> None:
        self.run = run
        shard = Shard(model, run)
        self._shard = shard
        last = experts if model.experts else mlp
        self._made: Mapping[Block, Callable[[], list[Operation]]] = {
            "embedding": lambda: embedding(shard),
            "layer": lambda: attention(shard) + mlp(shard),
            "kept layer": lambda: attention(shard) + mlp(shard),
            "expert layer": lambda: attention(shard) + experts(shard),
            "kept expert layer": lambda: attention(shard) + experts(shard),
            "second embedding": lambda: embedding(shard, positions=False),
            "further token": lambda: joined(shard) + attention(shard) + last(shard),
            "head": lambda: head(shard, True),
            "tied head": lambda: head(shard, False),
            "further head": lambda: head(shard, False),
        }

    @cached_property
    def operations(self) -> Mapping[Block, list[Operation]]:
        with_experts = self._shard.model.experts is not None
        return {kind: make() for kind, make in self._made.items() if with_experts or "expert" not in kind}

    def mask_bytes(self, part: Part) -> float:
        """What all layers of the part together keep of a micro-batch's mask."""
        return mask_bytes(self._shard) if any(kind in _WITH_ATTENTION for kind in part) else 0

    def recomputed(self, block: Block) -> Recomputed:
        """What of the block is carried out again before its backward, and what it keeps until then."""
        operations = self.operations[block]
        if self.run.recompute == "full" and block in _RECOMPUTED:
            kept = self.run.element_bytes * self._shard.residual
            return Recomputed(operations, kept)
        selective = self.run.recompute == "selective"
        again = [one for one in operations if one.core and selective]
        return Recomputed(again, sum(one.saved_bytes for one in operations if not (one.core and selective)))


class Recomputed(NamedTuple):
    """``operations``: carried out again; ``kept_bytes``: of the block, from its forward to its backward."""

    operations: list[Operation]
    kept_bytes: float
