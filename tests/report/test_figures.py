"""Pictures of divisions of a model and of the memory-limit curve."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
from matplotlib.colors import to_rgb

from evenpipe.report.figures import Division, Limit, draw_divisions, draw_limit

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


#: A peak of 1 + k·b GiB and a limit of 9.5.
PEAKS = {(k, b): 1.0 + k * b for k in range(1, 10) for b in (1, 2, 4, 8, 16)}
CURVE = {(1, 8), (2, 4), (3, 2), (4, 2), (5, 1), (6, 1), (7, 1), (8, 1)}


def test_memory_runs_out_between_the_largest_that_fits_and_the_next_size() -> None:
    for k, b in Limit("", 64, PEAKS, 9.5, CURVE).crossings():
        assert abs(1 + k * b - 9.5) < (1 if k == 9 else 1e-9), "below the smallest size it is not known exactly"


def test_where_all_fits_there_is_no_curve() -> None:
    assert Limit("", 16, PEAKS, 1000.0, {(1, 16)}).crossings() == []


def test_the_picture_shows_candidates_and_what_is_pruned(tmp_path: Path) -> None:
    one, all_of_them = tmp_path / "one.png", tmp_path / "all.png"
    draw_limit(one, Limit("four stages", 64, PEAKS, 9.5, {(1, 8)}))
    draw_limit(all_of_them, Limit("four stages", 64, PEAKS, 9.5, CURVE))
    assert _pixels(all_of_them, "#2f6db5") > 4 * _pixels(one, "#2f6db5") > 0
    assert 0 < _pixels(all_of_them, "#b9cbe0") < _pixels(one, "#b9cbe0")
    assert _pixels(all_of_them, "#d1495b") > 0
