"""Three constants by least squares on ordinary rows of BPipe's Table 7, and what is left out of a fit predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from evenpipe.planner.kernels import FITTED, UNFITTED, Calibration

from .korthikanti import relative_errors
from .tables import Row, estimators, taken

__all__ = ["errors", "fitted", "left_out", "unseen"]

_NAMES: Final = ("gemm", "unfused", "peer")
_STEP: Final = 1e-3
_ROUNDS: Final = 4
_Errors = NDArray[np.floating]


def errors(rows: Sequence[Row], calibration: Calibration = FITTED, programs: estimators | None = None) -> _Errors:
    """Points of MFU, estimate less measurement."""
    estimate = programs or estimators()
    for one in estimate.values():
        one.calibration = calibration
    found = np.array([100 * estimate(row).mfu - row.mfu for row in rows])
    for one in estimate.values():
        one.calibration = FITTED
    return found


def fitted(rows: Sequence[Row], programs: estimators | None = None) -> Calibration:
    """By Gauss and Newton from what is known without a fit; BPipe's rows are never among them."""
    assert not any(row.bpipe for row in rows)
    programs, found = programs or estimators(), UNFITTED
    for _ in range(_ROUNDS):
        now, slopes = _linear(rows, found, programs)
        change = np.linalg.lstsq(slopes, -now, rcond=None)[0]
        found = _moved(found, change)
    return found


def left_out(rows: Sequence[Row], programs: estimators | None = None) -> _Errors:
    """The error of each row under the fit to all the others: e / (1 − h), to first order."""
    programs = programs or estimators()
    now, slopes = _linear(rows, fitted(rows, programs), programs)
    leverage = np.sum(slopes * np.linalg.pinv(slopes).T, axis=1)
    return now / (1 - leverage)


def unseen(programs: estimators | None = None) -> dict[str, list[float]]:
    """By source, how much longer each iteration took than estimated by constants that the source had no part in.

    The two models of Table 7 are fitted one by one, and each shows the other; Korthikanti's runs are shown by both.
    """
    programs, every, found = programs or estimators(), taken(), {}
    for one, other in (("gpt3-96b", "gpt3-134b"), ("gpt3-134b", "gpt3-96b")):
        fit = fitted([row for row in every if row.model == one and not row.bpipe], programs)
        shown = [row for row in every if row.model == other]
        points = errors(shown, fit, programs)
        found[f"{other}, fitted on {one}"] = [float(error / row.mfu) for row, error in zip(shown, points, strict=True)]
    found["Korthikanti, fitted on BPipe"] = [1 / (1 + error) - 1 for error in relative_errors().values()]
    return found


def _linear(rows: Sequence[Row], at: Calibration, programs: estimators) -> tuple[_Errors, _Errors]:
    now = errors(rows, at, programs)
    slopes = [(errors(rows, _moved(at, _STEP * unit), programs) - now) / _STEP for unit in np.eye(len(_NAMES))]
    return now, np.stack(slopes, axis=1)


def _moved(at: Calibration, by: _Errors) -> Calibration:
    return replace(at, **{name: float(getattr(at, name) + change) for name, change in zip(_NAMES, by, strict=True)})
