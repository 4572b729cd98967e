"""NVIDIA's published iterations of 2025 and 2026, dense and with experts, beside estimates of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from evenpipe.descriptions import Cluster, Model, cluster, framework, model
from evenpipe.planner.estimate import Estimate, Estimator
from evenpipe.planner.kernels import FITTED, Calibration
from evenpipe.planner.operations.parts import Blocks, parts_of
from evenpipe.planner.run import Run
from evenpipe.planner.stage_bytes import chunks_of, slack, stage_states

__all__ = ["Published", "layers", "published"]


class Published(NamedTuple):
    """``seconds``: of an iteration; ``gib``: allocated on the fullest GPU; None where that was not published.

    kept_once: a recipe without transposed copies of FP8 weights.
    """

    kind: str
    source: str
    kept_once: bool
    model: Model
    cluster: Cluster
    run: Run
    seconds: float | None
    gib: float | None

    def __str__(self) -> str:
        run = self.run
        sizes = f"t{run.tensor} p{run.stages} c{run.context} v{run.chunks} e{run.expert} B{run.global_batch}"
        return f"{self.model.name} {self.cluster.name} {run.quantized or 'bf16'} {sizes}"

    def estimate(self, calibration: Calibration = FITTED, device: dict[str, Any] | None = None) -> Estimate:
        """``device``: what the description of its device is taken to say."""
        where = self.cluster
        if device:
            where = where.model_copy(update={"device": where.device.model_copy(update=device)})
        return Estimator(self.model, where, framework("megatron"), calibration)(self.run)

    def error(self, calibration: Calibration = FITTED, device: dict[str, Any] | None = None) -> float:
        """Return estimated seconds over measured ones, less one."""
        assert self.seconds is not None
        return self.estimate(calibration, device).iteration_ms / 1e3 / self.seconds - 1

    def allocated_gib(self) -> float:
        """Return what is allocated on the fullest GPU by the estimate: no reserve, no slack of the allocator."""
        once = {"transposing": False} if self.kept_once else None
        found = self.estimate(device=once)
        run, p = found.run, found.run.stages
        chunks = chunks_of(parts_of(self.model, run), Blocks(self.model, run))
        each = []
        for number, stage in enumerate(found.stages):
            held, step = stage.bytes, stage_states(chunks[number::p], run, 1, not once).step
            comes_and_goes = max((held.activations + held.buffers) / slack(run), step)
            each.append(held.weights + held.gradients + held.optimizer + comes_and_goes)
        return max(each) / 2**30


def layers(layout: str) -> tuple[int, ...]:
    """Layers of each part of ``--pipeline-model-parallel-layout``."""
    text, before = layout.replace(",", ""), ""
    while text != before:
        before = text
        text = re.sub(r"\(([^()]*)\)\*(\d+)|([EtmL])\*(\d+)", lambda of: (of[1] or of[3]) * int(of[2] or of[4]), text)
    return tuple(part.count("t") for part in text.split("|"))


def _even(number: int, parts: int) -> tuple[int, ...]:
    """As the recipes divide layers: evenly, or with embedding and loss counted as layers."""
    if number % parts == 0:
        return (number // parts,) * parts
    each = (number + 2) // parts
    return (each - 1, *(each,) * (parts - 2), each - 1)


@cache
def published() -> Sequence[Published]:
    """Every row of recipes.yaml."""
    found = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    return [_published(kind, row) for kind, rows in found.items() for row in rows]


_GB = 2**30 / 1e9
#: Keys of a row that are fields of Run.
_OF_RUN = ("quantized", "quantized_attention", "dispatcher", "overlap_experts", "fused_experts", "moment_bytes")


def _published(kind: str, row: dict[str, Any]) -> Published:
    of, where = model(row["model"]), cluster(row["cluster"])
    said = {"sequence": row.get("s"), "mtp_layers": row.get("mtp")}
    of = of.model_copy(update={key: value for key, value in said.items() if value is not None})
    t, p, c, v, b = (row.get(key, 1) for key in "tpcvb")
    narrow = row.get("quantized")
    experts = {"expert": row["e"], "expert_tensor": 1} if "e" in row else {}
    run = Run(
        row["B"],
        tensor=t,
        stages=p,
        context=c,
        chunks=v,
        micro_batch=b,
        data=where.gpus // (t * p * c),
        layout=layers(row["layout"]) if "layout" in row else _even(of.layers, p * v),
        recompute="selective" if "modules" in row else "none",
        recomputed_modules=tuple(row.get("modules", ())),
        gradients_in_fp32=False,
        quantized_parameters=narrow not in (None, "nvfp4"),
        user_buffers=t > 1 and narrow != "nvfp4" and (not experts or c > 1),
        graphs=tuple(row.get("graphs", ())),
        **{key: row[key] for key in _OF_RUN if key in row},
        **experts,
    )
    gib = row["gb"] / _GB if "gb" in row else None
    return Published(kind, row["source"].split(" ")[0], "gb" in row, of, where, run, row.get("seconds"), gib)
