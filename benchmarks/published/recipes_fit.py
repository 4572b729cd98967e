"""Constants of devices and dispatchers by least squares on published iterations, and sources that a fit leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from evenpipe.planner.kernels import FITTED, Calibration

from .recipes import Published

__all__ = ["CONSTANTS", "classes", "errors", "fitted", "left_out"]

_BACKWARD: Final = 0.84  # of the forward's rate of fused attention, as FlashAttention-3's figures have it
#: What is fitted, as the descriptions of Hopper and Blackwell and the calibration have it, rounded.
CONSTANTS: Final[Mapping[str, float]] = {
    "hopper fp8": 0.792,
    "blackwell bf16": 0.697,
    "blackwell fp8": 0.702,
    "blackwell fp4": 0.801,
    "blackwell attention": 0.352,
    "blackwell elementwise": 0.758,
    "host x86": 13.6,
    "host grace": 8.5,
    "beside experts": 0.704,
    "dispatch": 1.39e-4,
}
_STEP: Final = 0.02
_FAR: Final = 0.08
_STILL: Final = 0.1
_Errors = np.ndarray[Any, Any]


def errors(rows: Sequence[Published], constants: Mapping[str, float] | None = None) -> np.ndarray[Any, Any]:
    """The logarithm of estimated over measured seconds."""
    found = []
    for row in rows:
        calibration, device = (FITTED, None) if constants is None else _with(row, constants)
        found.append(np.log1p(row.error(calibration, device)))
    return np.array(found)


def _with(row: Published, of: Mapping[str, float]) -> tuple[Calibration, dict[str, Any]]:
    calibration = replace(FITTED, beside_experts=of["beside experts"], dispatch=of["dispatch"])
    if row.cluster.device.name in ("h100", "h200"):
        return calibration, {"narrow_matmul": {"fp8": of["hopper fp8"]}, "host_us": of["host x86"]}
    return calibration, {
        "matmul": of["blackwell bf16"],
        "narrow_matmul": {"fp8": of["blackwell fp8"], "fp4": of["blackwell fp4"]},
        "attention": (of["blackwell attention"], _BACKWARD * of["blackwell attention"]),
        "elementwise": of["blackwell elementwise"],
        "host_us": of["host grace" if row.cluster.device.name.startswith("gb") else "host x86"],
    }


def _linear(rows: Sequence[Published], at: Mapping[str, float]) -> tuple[_Errors, _Errors]:
    """Errors, and how they change with the logarithm of each constant."""
    now, each = errors(rows, at), []
    for name in CONSTANTS:
        each.append((errors(rows, {**at, name: at[name] * (1 + _STEP)}) - now) / np.log1p(_STEP))
    return now, np.stack(each, 1)


def _change(now: _Errors, slopes: _Errors) -> _Errors:
    """Rows that are far off count by their distance, not its square (Huber); what no row tells of stays as it is."""
    weights = np.sqrt(np.minimum(1, _FAR / np.maximum(np.abs(now), 1e-9)))
    still = _STILL * np.eye(slopes.shape[1])
    wanted = np.concatenate([-now * weights, np.zeros(len(still))])
    found: _Errors = np.linalg.lstsq(np.vstack([slopes * weights[:, None], still]), wanted, rcond=None)[0]
    return np.clip(found, -0.3, 0.3)


def fitted(rows: Sequence[Published], rounds: int = 1) -> dict[str, float]:
    """By Gauss and Newton on logarithms, from `CONSTANTS`."""
    found = dict(CONSTANTS)
    for _ in range(rounds):
        change = _change(*_linear(rows, found))
        found = {name: value * float(np.exp(by)) for (name, value), by in zip(found.items(), change, strict=True)}
    return found


def left_out(rows: Sequence[Published], groups: Sequence[str]) -> _Errors:
    """The error of each row under the fit, to first order, to all rows but those of its group."""
    now, slopes = _linear(rows, CONSTANTS)
    of, found = np.array(groups), np.empty(len(rows))
    for group in set(groups):
        change = _change(now[of != group], slopes[of != group])
        found[of == group] = now[of == group] + slopes[of == group] @ change
    return np.expm1(found)


def classes(rows: Sequence[Published]) -> dict[str, list[int]]:
    """Return the numbers of the rows of each kind: dense in 16 bits and in fewer, and with experts."""
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        narrow = "8 and 4 bits" if row.run.quantized else "16 bits"
        found.setdefault("experts" if row.kind == "experts" else f"dense, {narrow}", []).append(number)
    return found
