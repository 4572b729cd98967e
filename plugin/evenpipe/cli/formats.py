"""The JSON schemas of what commands print with ``--json``: ``python -m evenpipe.cli.formats FOLDER`` writes them."""

# Models that are made of tuples are known at run time only.
# mypy: disable-error-code="valid-type"

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model

from evenpipe.doctor import Verdict
from evenpipe.fitting import Fit
from evenpipe.layouts.layers import Layer
from evenpipe.layouts.written import StagePlan as LayoutStage
from evenpipe.layouts.written import WrittenLayout
from evenpipe.order_search.costs import RunCosts
from evenpipe.partition.search.plan import Plan as Partition
from evenpipe.planner.search.plan import Plan, StagePlan
from evenpipe.planner.uncertainty import Uncertainty
from evenpipe.report.bubbles import Wait
from evenpipe.report.page.content import SimulationDocument
from evenpipe.simulate.front import Point
from evenpipe.train.result import StageMeasurement
from evenpipe.tuner.grouped import Candidate
from evenpipe.tuner.tuner import Retune
from evenpipe.upstream.findings import Purpose

__all__ = ["FORMATS", "schema"]


def _object(of: type[NamedTuple], **more: Any) -> Any:
    """Return a model of an object with the fields of a tuple, as ``_asdict`` writes it, and ``more``."""
    fields: dict[str, Any] = {name: (kind, ...) for name, kind in (get_type_hints(of) | more).items()}
    return create_model(of.__name__, __doc__=of.__doc__, **fields)


class _Document(BaseModel):
    model_config = ConfigDict(populate_by_name=True)


_Memory = list[list[tuple[float, int, int]]]
_Point, _Candidate = _object(Point), _object(Candidate, peak_bytes=list[int])
_Uncertainty, _Wait, _Retune = _object(Uncertainty), _object(Wait), _object(Retune)
_Stage = _object(StageMeasurement, stage=int, predicted_peak_bytes=int)


class Schedule(_Document):
    """The actions of each stage, in order; peak_live: units × chunks; recomputed: parts of the model."""

    format: Literal["evenpipe.schedule/1"]
    name: str
    bpipe: bool
    stages: int
    micro_batches: int
    chunks: int
    group_size: int
    batches: int
    actions: list[list[str]]
    bound: int
    bounds: list[int]
    peak_live: list[int]
    evictions: list[int]
    recomputed: list[int]


class Action(_Document):
    """When an action starts and ends."""

    action: str
    start_ms: float
    end_ms: float


class Simulation(SimulationDocument):
    """A schedule in time; memory: of each stage [at_ms, live units, bytes]; on_devices_ms: with a device's queues."""

    schedule_text: str = Field(alias="schedule")
    left_bytes: list[list[int]] | None
    on_devices_ms: float | None = None


class MemoryFront(_Document):
    """Memory against time (`simulate --front`): known schedules, searched ones, and straight ones that may evict."""

    format: Literal["evenpipe.front/1"]
    limit_ms: float
    base_bytes: int
    known: list[_Point]
    searched: list[_Point]
    evicting: list[_Point]


class Candidates(_Document):
    """Group sizes and micro-batch sizes that fit, with the bytes of one process of each stage."""

    format: Literal["evenpipe.candidates/1"]
    candidates: list[_Candidate]


class Estimate(_Document):
    """Predicted memory and time of a run; mfu as papers count it; uncertainty: of iteration_ms, as fractions."""

    format: Literal["evenpipe.estimate/1"]
    fits: bool
    reason: str | None
    mfu: float
    logged_tflops_per_gpu: float
    iteration_ms: float
    samples_per_second: float
    tokens_per_second_per_gpu: float
    uncertainty: _Uncertainty
    stages: list[StagePlan]
    warnings: list[str]


class Cuts(_Document):
    """A layout; halves: the parts that begin in a layer's middle, chunk by chunk and stage by stage."""

    max_stage_ms: float
    layout: str
    stages: list[LayoutStage]
    halves: list[int]


class Layout(WrittenLayout):
    """The best layout (`partition --megatron`); even: without it; proven: none is better; layers: the pieces."""

    search_ms: float
    source: str
    proven: bool
    max_stage_ms: float
    even: Cuts
    layers: list[Layer]


class LayoutCheck(_Document):
    """A layout beside the best one (`partition --megatron --check`); slower: by this part of the best's iteration."""

    format: Literal["evenpipe.layout-check/1"]
    problem: str | None
    layout: str
    slower: float
    slowest_stage: int
    estimate: Estimate
    best: str
    best_estimate: Estimate


class Run(_Document):
    """A run that was measured. What is not finite is null, but in losses_hex; timeline: the last iteration's."""

    format: Literal["evenpipe.run/1"]
    title: str
    first_iteration: int
    losses: list[float | None]
    losses_hex: list[str]
    grad_norms: list[float | None]
    skipped_iterations: list[int]
    weights_sha256: str
    weight_versions_peak: int
    retunes: list[_Retune]
    iteration_ms: list[float]
    stages: list[_Stage]
    unit_bytes: list[list[int]]
    left_bytes: list[list[int]]
    timeline: list[list[Action]]
    memory: _Memory
    predicted: Simulation
    waits: list[_Wait]
    settings: dict[str, Any]
    versions: dict[str, str]
    device: str


class Finding(_Document):
    """A finding of the doctor, and its ranks."""

    check: str
    verdict: Literal[tuple(one.value for one in Verdict)]
    said: str
    remedy: str | None
    ranks: list[int]


class Pair(_Document):
    """The link between two partners of BPipe."""

    stages: tuple[int, int]
    ranks: tuple[int, int]
    crosses_nodes: bool
    gbps: float
    needs_gbps: float | None
    hides_all_gbps: float | None


class Doctor(_Document):
    """Checks of a machine, or of a job's; ok: none found a problem; missing: ranks that did not come."""

    format: Literal["evenpipe.doctor/1"]
    ok: bool
    ranks: int
    missing: list[int]
    findings: list[Finding]
    pairs: list[Pair]


class Symbol(_Document):
    """A symbol of a framework that a feature needs; patch: its name where it is replaced; series: its releases."""

    needed_for: Literal[tuple(one.value for one in Purpose)]
    set: str
    patch: str | None
    symbols: list[str]
    series: list[str]
    state: str
    detail: str | None
    reason: str | None


class Framework(_Document):
    """An installed framework, or a checkout: where, which release, whether all is as recorded."""

    path: str | None
    version: str | None
    series: str | None
    supported: bool
    problems: list[str]
    symbols: list[Symbol]


class Patches(_Document):
    """What is replaced; the first keys are Megatron's, absent without it."""

    format: Literal["evenpipe.patches/1"]
    path: str | None = None
    version: str | None = None
    series: str | None = None
    supported: bool = False
    problems: list[str] = []
    symbols: list[Symbol] = []
    cpu_mode_problems: list[str] = []
    wrong_apex: str | None = None
    deepspeed: Framework | None


class Predicted(_Document):
    """The estimate of a recipe. memory_gib: of the fullest stage."""

    fits: bool
    memory_gib: float
    device_gib: float
    iteration_ms: float
    uncertainty: _Uncertainty
    mfu: float


class Recipe(_Document):
    """The files that were written into a folder."""

    format: Literal["evenpipe.recipe/1"]
    folder: str
    files: list[str]
    predicted: Predicted


class RecipeCheck(_Document):
    """Problems of a recipe, and what was not checked. predicted: null where there are problems."""

    format: Literal["evenpipe.recipe-check/1"]
    folder: str
    problems: list[str]
    notes: list[str]
    predicted: Predicted | None


class Page(_Document):
    """A page that was written."""

    format: Literal["evenpipe.page/1"]
    title: str
    path: str


class Demo(_Document):
    """The demo's runs by name."""

    format: Literal["evenpipe.demo/1"]
    machine: dict[str, float]
    runs: dict[str, Run]
    picture: str
    page: str | None


class Error(_Document):
    """Bad input: the line that is on standard error too."""

    error: str


#: By the name of the format; an error has none.
FORMATS: Final[Mapping[str, type[BaseModel]]] = {
    "schedule": Schedule,
    "simulation": Simulation,
    "front": MemoryFront,
    "costs": RunCosts,
    "candidates": Candidates,
    "estimate": Estimate,
    "fit": Fit,
    "plan": Plan,
    "recipe": Recipe,
    "recipe-check": RecipeCheck,
    "partition": Partition,
    "layout": Layout,
    "layout-check": LayoutCheck,
    "run": Run,
    "demo": Demo,
    "page": Page,
    "doctor": Doctor,
    "patches": Patches,
    "error": Error,
}


def schema(name: str) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a document of ``FORMATS``."""
    found = TypeAdapter(FORMATS[name]).json_schema(mode="validation", by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


if __name__ == "__main__":
    for each in FORMATS:
        (Path(sys.argv[1]) / f"{each}.json").write_text(json.dumps(schema(each), indent=1, sort_keys=True) + "\n")
