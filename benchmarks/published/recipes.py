"""NVIDIA's published iterations of 2025 and 2026, in bf16, FP8, MXFP8 and NVFP4, beside estimates of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from evenpipe.planner.descriptions import cluster, framework, model
from evenpipe.planner.estimate import estimate
from evenpipe.planner.run import Run

__all__ = ["Published", "iterations", "layers"]


class Published(NamedTuple):
    """``longer``: measured seconds over estimated ones, less one."""

    row: dict[str, Any]
    name: str
    longer: float
    gib: float


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
def rows() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    return found


def iterations(kind: str = "dense") -> Iterator[Published]:
    """Each row of a kind."""
    for row in rows()[kind]:
        of, where = (
            model(
                row["model"]
                if row["model"][0] in "ldn" and row["model"][:2] != "gr"
                else f"/tmp/moe.yaml:{row['model']}"
            ),
            cluster(row["cluster"]),
        )
        said = {"sequence": row.get("s"), "mtp_layers": row.get("mtp")}
        of = of.model_copy(update={key: value for key, value in said.items() if value is not None})
        t, p, c, v, b = (row.get(key, 1) for key in "tpcvb")
        quantized = row.get("quantized")
        run = Run(
            row["B"],
            tensor=t,
            stages=p,
            context=c,
            chunks=v,
            micro_batch=b,
            data=where.gpus // (t * p * c),
            layout=layers(row["layout"]) if "layout" in row else _even(of.layers, p * v),
            expert=row.get("e", 1),
            expert_tensor=1 if "e" in row else None,
            recompute="selective" if "modules" in row else "none",
            recomputed_modules=tuple(row.get("modules", ())),
            gradients_in_fp32=False,
            quantized=quantized,
            quantized_parameters=quantized not in (None, "nvfp4"),
            quantized_attention=row.get("quantized_attention", False),
            user_buffers=t > 1 and quantized != "nvfp4" and "e" not in row,
            dispatcher=row.get("dispatcher", "alltoall"),
            overlap_experts=row.get("overlap_experts", False),
            fused_experts=row.get("fused_experts", False),
            graphs=tuple(row.get("graphs", ())),
        )
        found = estimate(of, where, run, framework("megatron"))
        held = max(one.bytes.total for one in found.stages) / 2**30
        yield Published(
            row,
            f"{row['model']} {row['cluster']} {quantized or 'bf16'} t{t} p{p} c{c} v{v} B{row['B']}",
            row["seconds"] / found.iteration_ms * 1e3 - 1,
            held,
        )


if __name__ == "__main__":
    import sys
    from statistics import fmean

    errors: dict[str, list[float]] = {}
    for kind in sys.argv[1:] or ["dense", "experts"]:
        for one in iterations(kind):
            error = 1 / (1 + one.longer) - 1
            errors.setdefault(kind + (" bf16" if "bf16" in one.name else " narrow"), []).append(error)
            print(f"{one.name:60s} {error:+.1%} {one.gib:.1f} {one.row.get('gb', '')}")
    for kind, each in errors.items():
        print(kind, f"{fmean(map(abs, each)):.1%} {fmean(each):+.1%} worst {max(each, key=abs):+.1%}")
