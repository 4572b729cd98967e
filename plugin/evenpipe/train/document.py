"""The document `evenpipe.run/1`: what a run measured, what was predicted of it, its settings and versions."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any, Final

from evenpipe import __version__
from evenpipe.report.bubbles import waits_in
from evenpipe.schedule import Program
from evenpipe.simulate import Simulation, simulation_document
from evenpipe.train.engines import ENGINES
from evenpipe.train.options import TrainOptions, device_type
from evenpipe.train.predict import measured_costs, predicted_peaks
from evenpipe.train.result import RunResult

__all__ = ["run_document"]

_PACKAGES: Final = ("torch", "numpy")


def run_document(
    title: str, options: TrainOptions, program: Program, result: RunResult, prediction: Simulation
) -> dict[str, Any]:
    """What `result` measured, and:

    predicted: `evenpipe.simulation/1` of the last iteration, from the stages' median times, links being free. waits:
    what each stage waited for in the last iteration, by what was waited for. settings: the options. versions, device.
    """
    waits = waits_in(program.schedule.places, result.spans)
    document = result.to_json() | {
        "title": title,
        "predicted": simulation_document(program, measured_costs(program, result), prediction, result.unit_bytes),
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
