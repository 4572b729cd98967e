"""Trains tiny transformers that a plan cuts inside layers, with real DeepSpeed engines, and uncut ones beside them.

train_planned.py CASES.json OUT.json; a case is that of `train_tiny`, and what `Cut` has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import train_tiny
from train_tiny import Case, digest, engine_of, layers, loss_of, run

from evenpipe.deepspeed.planned import WholeModel
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.profiling import profile
from evenpipe.partition.search.finding import find_plan
from evenpipe.partition.timing import NodeTimes
from evenpipe.partition.trace import trace
from evenpipe.stage_code import write_stages
from evenpipe.upstream import ending


class Cut(NamedTuple):
    """How a model is cut, and what is done with it."""

    plan: str = ""  # the file; none: it is not cut
    stages: int = 2
    schedule: tuple[Any, ...] = ("1f1b", 8)
    optimize: str = "none"
    share: float = 1.0  # of the memory that keeping everything takes
    save: str = ""  # the folder in which a checkpoint is written when all has been trained
    load: str = ""
    weights_only: bool = False
    dtype: str = "float32"


class Alike:
    """Every node takes as long as every other."""

    name, device, device_type = "alike", "cpu", "cpu"

    def times(self, graph: Any, work: list[Any], precision: str, progress: Any) -> list[NodeTimes]:
        return [NodeTimes(1.0, 2.0) for _ in work]


def write_plan(case: Case, cut: Cut, traced: dict[str, Any]) -> None:
    """The plan and its code; each model is traced once."""
    model = repr((case._replace(stages=0, config={}, steps=0, evaluate=False, measure=False, decay=""), cut.dtype))
    if model not in traced:
        torch.manual_seed(0)
        whole = WholeModel(layers(case), loss_of, getattr(torch, cut.dtype)).train()
        tokens, labels = next(train_tiny.batches(0, 1, 1))
        graph = trace(whole, {"inputs": tokens, "labels": labels})
        traced[model] = graph, profile(graph, Alike(), "tiny")
    (graph, nodes), workload = traced[model], Workload(*cut.schedule)
    plan = find_plan(nodes, workload, cut.stages, 1 << 40)
    if cut.optimize != "none":
        limit = int(cut.share * max(part.peak_bytes for part in plan.stages))
        plan = find_plan(nodes, workload, cut.stages, limit, cut.optimize, 0.01)
    plan.write(Path(cut.plan))
    write_stages(graph, nodes, plan, Path(cut.plan))


def train(given: dict[str, Any]) -> dict[str, Any]:
    cut = Cut(**given.get("cut", {}))
    case = Case(**{key: value for key, value in given.items() if key != "cut"})
    try:
        engine, data = engine_of(case)
    except SystemExit as ended:  # which is said on standard error
        return {"status": ended.code}
    if cut.load:
        for _ in range(8 * 2):
            next(data)
        engine.load_checkpoint(cut.load, load_optimizer_states=not cut.weights_only)
    if case.measure:
        engine.executor.measure = True
    losses = []
    for _ in range(case.steps):
        losses.append(float(engine.train_batch(data_iter=data)).hex())
        if case.evaluate:
            losses.append(float(engine.eval_batch(data_iter=data)).hex())
    if hasattr(engine, "drain"):
        engine.drain()
    if cut.save:
        engine.save_checkpoint(cut.save)
    found = {
        "engine": type(engine).__name__,
        "stage": engine.stage_id,
        "losses": losses,
        "weights": {name: digest(weight) for name, weight in engine.module.named_parameters()},
        "layers": len(engine.module.forward_funcs),
    }
    if case.measure:
        snapshot = engine.executor.counter
        found |= {"peak_bytes": snapshot.peak_bytes, "evicted_bytes": snapshot.evicted_bytes}
    return found


if __name__ == "__main__":
    ending._FIRST_OF_A_NODE_SECONDS = ending._ANY_OTHER_SECONDS = 0.0  # no launcher ends the others first
    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    for one in json.loads(Path(sys.argv[1]).read_text()):
        how = Cut(**one.get("cut", {}))
        if how.plan and not Path(how.plan).exists():
            write_plan(Case(**{key: value for key, value in one.items() if key != "cut"}), how, models)
    run(train, Path(sys.argv[1]), Path(sys.argv[2]))
