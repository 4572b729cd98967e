"""NVIDIA's published iterations of low-rank adapters beside estimates of them, to which no constant was fitted."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import yaml

from evenpipe.descriptions import cluster, framework, model
from evenpipe.planner.estimate import Estimator
from evenpipe.planner.run import Run

__all__ = ["Adapters", "adapters"]

_SAMPLES, _TOKENS, _GPUS = 32, 4096, 8


class Adapters(NamedTuple):
    """One iteration; GB300's rate over GB200's is by a pair of these.

    ``whole``, ``packed``: estimated seconds over measured ones, less one: samples as one sequence, and of 256 tokens
    each, about what SQuAD's are.
    """

    name: str
    whole: float
    packed: float


def adapters() -> list[Adapters]:
    """Return each row of lora.yaml."""
    found = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))["rows"]
    each = []
    for row in found:
        seconds = _SAMPLES * _TOKENS / _GPUS / row["tokens"]
        off = [_seconds(row, parts) / seconds - 1 for parts in (1, 16)]
        each.append(Adapters(f"{row['cluster']} {row['quantized']} t{row['t']} p{row['p']}", *off))
    return each


def _seconds(row: dict[str, str | int], parts: int) -> float:
    t, p, where = int(row["t"]), int(row["p"]), cluster(str(row["cluster"]))
    grace = where.device.name.startswith("g")
    run = Run(
        _SAMPLES * parts,
        tensor=t,
        stages=p,
        data=_GPUS // (t * p),
        chunks=20,
        micro_batch=parts,
        quantized=row["quantized"],  # type: ignore[arg-type]
        quantized_parameters=True,
        gradients_in_fp32=False,
        user_buffers=t > 1,
        graphs=("mlp",) if grace else (),
        lora_rank=32,
        lora_modules=("linear_qkv",),
    )
    of = model("llama3-70b").of_sequence(_TOKENS // parts)
    return Estimator(of, where, framework("megatron"))(run).iteration_ms / 1e3
