"""Trains as train_tiny does, under 2bw, and once more in plain PyTorch on one rank.

A case is {"case": {..}}, and as wanted "evaluate", "changes" (the micro-batches of later batches) and "folder" (where a
checkpoint goes after `case.steps`; the job then goes on, and a second engine goes on from the checkpoint).
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
from train_tiny import MICRO_BATCH, Case, digest, engine_of, run

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.deepspeed.delayed import train_delayed

MORE = 2


def train(given: dict[str, Any]) -> dict[str, Any]:
    case = Case(**given["case"])
    engine, data = engine_of(case)
    if case.measure:
        engine.executor.measure = True
    losses, rates, evaluated = _train(engine, data, case.steps, given.get("evaluate", False))
    resumed: list[str] | None = None
    if "folder" in given:
        engine.save_checkpoint(given["folder"])
        more, later, _ = _train(engine, data, MORE)
        losses, rates = losses + more, rates + later
        again, data = engine_of(case)
        again.load_checkpoint(given["folder"])
        for _ in islice(data, case.steps * again.micro_batches):
            pass
        resumed, _, _ = _train(again, data, MORE)
        again.drain()
        weights = [_weights(again)]
        again.destroy()
    elif "changes" in given:
        weights = []
        engine.set_train_batch_size(given["changes"] * MICRO_BATCH * engine.grid.data_parallel_size)
        more, later, _ = _train(engine, data, MORE)
        losses, rates = losses + more, rates + later
    else:
        weights = []
    engine.drain()
    weights.append(_weights(engine))
    found = {
        "engine": type(engine).__name__,
        "losses": losses,
        "evaluated": evaluated,
        "resumed": resumed,
        "weights": weights,
        "steps": engine.global_steps,
        "versions": engine._steps.versions.peak,
    }
    if case.measure:
        snapshot = engine.executor.counter.snapshot()
        found |= {"peak_units": snapshot.peak_units, "left": snapshot.own_units}
    if dist.get_rank() == 0:
        found["delayed"] = train_delayed(
            case, engine.grid.data_parallel_size, engine.module.parts, rates, given.get("changes"), evaluated
        )
    engine.destroy()
    return found


def _train(engine: Any, data: Any, steps: int, evaluate: bool = False) -> tuple[list[str], list[float], list[str]]:
    losses, rates, evaluated = [], [], []
    for _ in range(steps):
        rates.append(engine.optimizer.param_groups[0]["lr"])
        losses.append(float(engine.train_batch(data_iter=data)).hex())
        if evaluate:
            evaluated.append(float(engine.eval_batch(data_iter=data)).hex())
    return losses, rates, evaluated


def _weights(engine: Any) -> dict[str, str]:
    return {name: digest(weight) for name, weight in engine.module.named_parameters()}


if __name__ == "__main__":
    run(train, Path(sys.argv[1]), Path(sys.argv[2]))
