"""Divisions of a model side by side; what is drawn is looked at through its pixels."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
from matplotlib.colors import to_rgb

from evenpipe.report.figures import Division, draw_divisions

GIB = 2**30
EVEN = Division("uniform", [10, 12, 10, 18], [20, 24, 20, 36], [0] * 4, [39 * GIB, 30 * GIB] * 2, [39 * GIB] * 4)
OURS = EVEN._replace(title="ours", extra_ms=[6, 0, 4, 0], peak_bytes=[20 * GIB] * 4)


def _pixels(path: Path, colour: str) -> int:
    image = matplotlib.image.imread(path)[..., :3]
    return int((np.abs(image - to_rgb(colour)).max(axis=-1) < 0.01).sum())


def test_a_stage_takes_its_forward_backward_and_what_saving_memory_adds() -> None:
    assert OURS.total_ms == [36, 36, 34, 54]


def test_the_picture_shows_what_memory_costs_and_saves(tmp_path: Path) -> None:
    without, beside = tmp_path / "without.png", tmp_path / "beside.png"
    draw_divisions(without, "a model", [EVEN, EVEN])
    draw_divisions(beside, "a model", [EVEN, OURS], limit_gib=40)
    legend = _pixels(without, "#e0a458")
    assert _pixels(beside, "#e0a458") > 4 * legend > 0, "recomputation"
    assert _pixels(beside, "#d6d6d0") > 1.5 * _pixels(without, "#d6d6d0"), "what was held before"
    assert _pixels(beside, "#d1495b") > _pixels(without, "#d1495b") == 0, "the limit"
