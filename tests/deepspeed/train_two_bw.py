"""Trains as train_tiny does, under 2bw, and once more in plain PyTorch on one rank.

A case is {"case": {..}}, and as wanted "evaluate", "changes" (the micro-batches of later batches), "folder" (where a
checkpoint goes after `case.steps`; the job then goes on, and a second engine goes on from the checkpoint), "fused" (the
optimizer that DeepSpeed has for its own Adam), "broken" (a batch that has a loss that is no number), "iterators" (data
iterators that must not be), "norm" (that of the first batch), "interrupted" (a folder for checkpoints: the batches once
as they are, and once with an evaluation and a checkpoint after each and new engines on the way) and "refused" (what 2bw
cannot do with this configuration).
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import train_tiny
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import engine as deepspeed_engine
from torch import Tensor
from train_tiny import MICRO_BATCH, Case, batches, digest, engine_of, run

sys.path.insert(0, str(Path(__file__).parents[2]))

MORE = 2
_loss_of = train_tiny.loss_of
_FUSED_ADAM = deepspeed_engine.FusedAdam


class Net(PipelineModule):  # type: ignore[misc]
    """Has two more losses."""

    last = torch.zeros(())  # on stages without losses DeepSpeed asks for the names

    def get_additional_losses(self) -> OrderedDict[str, Tensor]:
        return OrderedDict(twice=Net.last * 2, half=Net.last / 2)


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    """No number where all labels are alike."""
    loss = _loss_of(output, labels)
    Net.last = loss.detach()
    return loss * float("nan") if (labels == labels[0, 0]).all() else loss


train_tiny.loss_of = loss_of
from tests.deepspeed.two_bw_cases import train_two_bw  # noqa: E402


def train(given: dict[str, Any]) -> dict[str, Any]:
    case = Case(**given["case"])
    deepspeed_engine.FusedAdam = torch.optim.AdamW if "fused" in given else _FUSED_ADAM
    if "refused" in given:
        return _refused(case)
    if "iterators" in given:
        return _iterators(case)
    if "interrupted" in given:
        return _interrupted(case, given["interrupted"])
    if "norm" in given:
        return {"norm": _first_norm(case)}
    train_tiny.PipelineModule = Net if "others" in given else PipelineModule
    engine, data = engine_of(case)
    data = _broken(data, given, engine.micro_batches)
    if case.measure:
        engine.executor.measure = True
    losses, rates, evaluated = _train(engine, data, case.steps, given.get("evaluate", False))
    others = engine.get_additional_losses()
    resumed: list[str] | None = None
    weights = []
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
        weights.append(_weights(again))
        again.destroy()
    elif "changes" in given:
        engine.set_train_batch_size(given["changes"] * MICRO_BATCH * engine.grid.data_parallel_size)
        more, later, _ = _train(engine, data, MORE)
        losses, rates = losses + more, rates + later
    engine.drain()
    weights.append(_weights(engine))
    found = {
        "engine": type(engine).__name__,
        "optimizer": type(engine.optimizer).__name__,
        "losses": losses,
        "others": None if others is None else {name: float(loss).hex() for name, loss in others.items()},
        "evaluated": evaluated,
        "resumed": resumed,
        "weights": weights,
        "steps": engine.global_steps,
        "skipped": engine.skipped_steps,
        "scale": engine.optimizer.loss_scale if engine.fp16_enabled() else 1,
        "versions": engine.two_bw.versions.peak,
    }
    if case.measure:
        snapshot = engine.executor.counter
        found |= {"peak_units": snapshot.peak_units, "left": snapshot.own_units}
    if dist.get_rank() == 0:
        replicas, micro_batches = engine.grid.data_parallel_size, case.config.get("gradient_accumulation_steps", 8)
        sources = [
            _broken(batches(replica, replicas, micro_batches, case.dynamic), given, micro_batches)
            for replica in range(replicas)
        ]
        found["delayed"] = train_two_bw(case, sources, engine.module.parts, rates, given.get("changes"), evaluated)
    engine.destroy()
    return found


def _broken(source: Iterator[Any], given: dict[str, Any], micro_batches: int) -> Iterator[Any]:
    for number, (tokens, labels) in enumerate(source):
        yield tokens, labels * 0 if number == given.get("broken", -1) * micro_batches else labels


def _refused(case: Case) -> dict[str, Any]:
    """What is said of an engine that was made for another schedule."""
    from evenpipe.deepspeed.section import SectionError
    from evenpipe.deepspeed.two_bw.optimizer_kinds import kind_of
    from evenpipe.deepspeed.unsupported import refuse_for_two_bw

    engine, _ = engine_of(case)
    try:
        refuse_for_two_bw(engine, kind_of(engine))
    except SectionError as error:
        return {"refused": str(error)}
    return {"refused": None}


def _interrupted(case: Case, folder: str) -> dict[str, Any]:
    engine, data = engine_of(case)
    losses, _, _ = _train(engine, data, case.steps)
    engine.drain()
    found = {"plain": (losses, _weights(engine), engine.optimizer.loss_scale), "skipped": engine.skipped_steps}
    engine.destroy()
    engine, data = engine_of(case)
    others = batches(7, 8, engine.micro_batches)
    losses = []
    for step in range(case.steps):
        losses += _train(engine, data, 1)[0]
        engine.eval_batch(data_iter=others)
        engine.save_checkpoint(folder, tag=f"after_{step}")
        if step in (2, 3, 6):
            engine.destroy()
            engine, data = engine_of(case)
            engine.load_checkpoint(folder, tag=f"after_{step}")
            for _ in islice(data, (step + 1) * engine.micro_batches):
                pass
    engine.drain()
    found["interrupted"] = (losses, _weights(engine), engine.optimizer.loss_scale)
    engine.destroy()
    return found


def _first_norm(case: Case) -> float:
    """Of the first batch's gradients, which under 2bw is known after the second one."""
    engine, data = engine_of(case)
    engine.train_batch(data)
    if not hasattr(engine, "drain"):
        return float(engine.get_global_grad_norm())
    engine.train_batch(data)
    norm = float(engine.get_global_grad_norm())
    engine.drain()
    return norm


def _iterators(case: Case) -> dict[str, Any]:
    """What the first stage says of another iterator, and of one that ended; the job can go on after `drain`."""
    engine, data = engine_of(case)
    _train(engine, data, 1)
    data = islice(data, 2 * engine.micro_batches)
    said = [_said(engine, data)]
    engine.drain()
    _train(engine, data, 2)
    said.append(_said(engine, data))
    engine.drain()
    said.append(_said(engine, iter(())))
    return {"said": said}


def _said(engine: Any, data: Any) -> str:
    error = io.StringIO()
    if dist.get_rank() == 0:  # the others would wait for it
        with contextlib.redirect_stderr(error), contextlib.suppress(SystemExit):
            engine.train_batch(data_iter=data)
        engine.timers("train_batch").stop()
    return error.getvalue()


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
