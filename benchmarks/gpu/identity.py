"""Whether every schedule trains to the same bits, losses and weights, as a loop without a pipeline on the same device.

The argument is the engine: "module" (plain torch) or "evenpipe" (megatron-core). Megatron's weights are told stage by
stage, so that they are compared with those of the first schedule that cuts the model alike, and losses with the loop's.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from evenpipe.schedule import Places, Size, find, names
from evenpipe.train.engine import engine_module
from evenpipe.train.options import TrainOptions

from .rank import UNDER_WAY, Rank
from .training import evicting_group, options_of, train

__all__ = ["run"]

# Clipping would add norms up in as many parts as there are stages.
_MODEL: Final = {"layers": 8, "micro_batches": 8, "iterations": 3, "untie_embeddings": True, "clip_grad": 0.0}
_SIZES: Final = ({"hidden": 256, "seq_length": 128, "micro_batch_size": 2}, {"hidden": 32, "seq_length": 32})
# What matters most comes first, should time run out.
_FIRST: Final = ("1f1b", "1f1b with BPipe", "Megatron's own 1f1b", "kfkb with BPipe", "2bw", "2bw with BPipe", "kfkb")


def run(rank: Rank, engine: str) -> None:
    engine_module(engine).prepare(rank.device)
    torch.use_deterministic_algorithms(rank.place != "cpu")
    # Else receive buffers would be filled first, and hide what reads them too early.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    stock = "megatron" if engine == "evenpipe" else engine
    asked_for: dict[str, Any] = {
        "interleaved": {"chunks": 2},
        "interleaved-zb": {"chunks": 2},
        "kfkb": {"group_size": evicting_group(rank.ranks)},
    }
    cases: dict[str, dict[str, Any]] = {
        name + " with BPipe" * bpipe: {"schedule": name, "bpipe": bpipe, **asked_for.get(name, {})}
        for name in names()
        for bpipe in (False, True)
    }
    if stock != engine and rank.over_nccl:
        cases["Megatron's own 1f1b"] = {"engine": stock}
    elif stock != engine:
        rank.unchecked("Megatron's own 1f1b", "it sends by itself, and gloo cannot send a GPU's memory")
    rank.unchecked("2bw against its update rule", "what implements that independently computes on the CPU")
    order = sorted(cases, key=lambda what: _FIRST.index(what) if what in _FIRST else len(_FIRST))
    precisions = ("bf16", "fp32")
    rank.expect(f"{what}, {precision}" for precision in precisions for what in ("one stage", *order))
    for precision in precisions:
        shared: dict[str, Any] = {**_MODEL, **rank.pick(*_SIZES), "precision": precision, "engine": engine}
        found: dict[Any, Any] = {}
        _compare(rank, f"one stage, {precision}", "one stage", found, {**shared, "stages": 1, "engine": stock})
        for what in order:
            reference = "2bw" if what.startswith("2bw") else "one stage"
            case = {**shared, "stages": rank.ranks, **cases[what]}
            _compare(rank, f"{what}, {precision}", reference, found, case)


def _placed(options: TrainOptions) -> Places:
    """Return which part of the model each stage has: in a V others than in a loop."""
    spec = find(options.schedule)
    size = spec.fitted(Size(options.stages, options.micro_batches, options.chunks, int(options.group_size)))
    return spec.places(size)


def _compare(rank: Rank, what: str, reference: str, found: dict[Any, Any], case: dict[str, Any]) -> None:
    """Add a row, or why there is none. What is not `found` yet is what others are compared with."""
    options = options_of(rank, what, **case)
    if options is None:
        return
    if rank.number == 0:
        rank.row(what, UNDER_WAY)
    result = train(rank, options)
    if result is None:
        return
    cut = "any" if options.engine == "module" else _placed(options)
    bits = {(reference, "losses"): [loss.hex() for loss in result.losses], (reference, cut): result.weights_sha256}
    first = (reference, "losses") not in found
    same = all(found.setdefault(key, value) == value for key, value in bits.items())
    compared = f"the bits of {reference}" if same else f"OTHER BITS than {reference}"
    rank.row(what, "what others are compared with" if first else compared)
