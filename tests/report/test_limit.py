"""The memory-limit curve runs where the peaks say; what is drawn is looked at through its pixels."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
from matplotlib.colors import to_rgb

from evenpipe.report.figures import Limit, draw_limit

#: A peak of 1 + k·b GiB and a limit of 9.5.
PEAKS = {(k, b): 1.0 + k * b for k in range(1, 10) for b in (1, 2, 4, 8, 16)}
CURVE = {(1, 8), (2, 4), (3, 2), (4, 2), (5, 1), (6, 1), (7, 1), (8, 1)}


def _pixels(path: Path, colour: str) -> int:
    image = matplotlib.image.imread(path)[..., :3]
    return int((np.abs(image - to_rgb(colour)).max(axis=-1) < 0.01).sum())


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
