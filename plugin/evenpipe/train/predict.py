"""A run beside its prediction, from what one micro-batch took and saved; and both as one JSON document."""

from __future__ import annotations

import platform
from collections import defaultdict
from importlib import metadata
from statistics import median
from typing import Any, Final

from evenpipe import __version__
from evenpipe.report.bubbles import waits_in
from evenpipe.schedule import KINDS, Cost, Program, Size
from evenpipe.simulate import Costs, Simulation, simulate, simulation_document
from evenpipe.train.engines import ENGINES
from evenpipe.train.options import TrainOptions
from evenpipe.train.result import RunResult
from evenpipe.train.rules import device_type

__all__ = ["last_program", "measured_costs", "predict", "predicted_peaks", "run_document", "through_the_stages"]

_PACKAGES: Final = ("torch", "numpy")


def last_program(options: TrainOptions, result: RunResult) -> Program:
    """Return the program of the last iteration: what the options ask for, or what was decided last."""
    if not result.retunes:
        return options.program
    decided = result.retunes[-1]
    micro_batches = options.micro_batches * options.micro_batch_size // decided.b
    return options.programs(Size(options.stages, micro_batches, group_size=decided.k))


def predict(program: Program, result: RunResult) -> Simulation:
    """Simulate `program` with every stage's median times and a micro-batch's bytes, as `result` has them.

    Links are free. Times and bytes are those of single actions, so that how they add up is the simulation's own.
    """
    return simulate(program, measured_costs(program, result), result.unit_bytes, result.left_bytes)


def measured_costs(program: Program, result: RunResult) -> Costs:
    """Return every stage's median times of a micro-batch; links are free."""
    taken = through_the_stages(program, result)
    halves = [(costs.get("input_gradient", 0.0), costs.get("weight_gradient", 0.0)) for costs in taken]
    # Where some backwards are split and some are whole, a half may have been measured to take longer than a whole.
    whole = [max(costs.get("backward", 0.0), sum(half)) for costs, half in zip(taken, halves, strict=True)]
    return Costs(
        forward_ms=tuple(costs["forward"] for costs in taken),
        backward_ms=tuple(whole),
        weight_gradient_ms=tuple(weight for _, weight in halves),
    )


def through_the_stages(program: Program, result: RunResult) -> list[dict[Cost, float]]:
    """Return the median ms of each kind of compute, by stage, for one micro-batch in all of the stage's chunks."""
    stages = []
    for spans in result.spans:
        times: dict[Cost, list[float]] = defaultdict(list)
        for action, start_ms, end_ms in spans:
            if (cost := KINDS[action.kind].cost) is not None:
                times[cost].append(end_ms - start_ms)
        stages.append({cost: program.schedule.chunks * median(each) for cost, each in times.items()})
    return stages


def predicted_peaks(prediction: Simulation, result: RunResult) -> tuple[int, ...]:
    """Return bytes of saved activations at each stage's peak over all iterations, of which `prediction` is the last."""
    return result.predicted_saved_bytes or tuple(stage.peak_bytes for stage in prediction.stages)


def run_document(
    title: str, options: TrainOptions, program: Program, result: RunResult, prediction: Simulation
) -> dict[str, Any]:
    """Return what `result` measured, and:

    predicted: `evenpipe.simulation/1` of the last iteration, from the stages' median times, links being free. waits:
    what each stage waited for in the last iteration, by what was waited for. settings: the options. versions, device.
    """
    waits = waits_in(program.schedule.places, result.spans)
    document = result.to_json() | {
        "title": title,
        "predicted": simulation_document(
            program, measured_costs(program, result), prediction, result.unit_bytes, result.left_bytes
        ),
        "waits": [wait.to_json() for wait in waits.stages],
        "settings": options.model_dump(mode="json"),
        "versions": _versions(options),
        "device": device_type(options.world_size),
    }
    for stage, predicted in zip(document["stages"], predicted_peaks(prediction, result), strict=True):
        stage["predicted_peak_bytes"] = predicted
    return document


def _versions(options: TrainOptions) -> dict[str, str]:
    of_engine = ("megatron-core",) if ENGINES[options.engine].framework == "megatron" else ()
    found = {name: metadata.version(name) for name in (*_PACKAGES, *of_engine)}
    return {"evenpipe": __version__, "python": platform.python_version(), **found, "system": platform.platform()}
