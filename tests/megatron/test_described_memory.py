"""What descriptions say that stages hold is what megatron-core's own model holds when it is built and run."""

from __future__ import annotations

from typing import Literal

import pytest

pytest.importorskip("megatron.core")

from evenpipe.descriptions import Model
from evenpipe.planner.operations.parts import Blocks, parts_of
from evenpipe.planner.run import Recompute, Run
from evenpipe.planner.stage_bytes import chunks_of, states
from evenpipe.runtime.communicators import link_bytes
from evenpipe.schedule import links, loop
from evenpipe.train.machine import PlannedRun, stage_memories

#: Of six heads no fused softmax makes a kernel, on the meta device as on a GPU.
SIZES = {"layers": 8, "hidden": 384, "heads": 6}


#: Kind of model, what is carried out again, and dropout, whose masks have a byte an element on a GPU.
CASES: list[tuple[Literal["gpt", "bert"], Recompute, float]] = [
    ("gpt", "none", 0.0),
    ("gpt", "full", 0.0),
    ("gpt", "none", 0.1),
    ("gpt", "selective", 0.1),
    ("bert", "none", 0.1),
    ("bert", "full", 0.0),
]


def described(kind: str, recompute: Recompute, dropout: float) -> list[tuple[int, int]]:
    """Of each stage, bytes that stay, and those saved of a micro-batch of one sample."""
    vocabulary = 256 if kind == "gpt" else 384
    model = Model(name="own", vocabulary=vocabulary, sequence=256, dropout=dropout > 0, causal=kind == "gpt", **SIZES)
    run = Run(
        global_batch=8,
        stages=4,
        recompute=recompute,
        precision="bf16",
        attention="unfused",
        fused_softmax=False,
        gradients_in_fp32=True,
        sharded_optimizer=False,
    )
    chunks = chunks_of(parts_of(model, run), Blocks(model, run))
    return [(round(states(chunk.parameters, run).stay), round(chunk.kept_bytes)) for chunk in chunks]


@pytest.mark.long
def test_within_two_percent() -> None:
    sizes = {"seq_length": 256, "precision": "bf16", "stages": 4, "micro_batches": 8, **SIZES}
    cases = [PlannedRun(model=kind, recompute=scope, dropout=dropout, **sizes) for kind, scope, dropout in CASES]
    for case, stages in zip(CASES, stage_memories(cases, "cuda"), strict=True):
        for number, (found, (static, saved)) in enumerate(zip(stages, described(*case), strict=True)):
            communicators = link_bytes(links(loop(4)), number)
            assert static == pytest.approx(found.static_bytes - communicators, rel=0.02), (case, number)
            assert saved == pytest.approx(found.sample_bytes + found.fixed_bytes, rel=0.02), (case, number)
