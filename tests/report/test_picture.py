"""Pictures show every stage of every timeline; what is drawn is looked at through its pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from evenpipe.report.picture import draw_comparison, shade
from evenpipe.report.timeline import StageMemory, Timeline
from evenpipe.schedule import KINDS, lower
from evenpipe.simulate import Costs, Wire, simulate
from tests.schedules import build

Colour = tuple[float, float, float]


def timeline(name: str, p: int, m: int, chunks: int = 1, bpipe: bool = False, batches: int = 1) -> Timeline:
    wire = Wire(transmit_ms=0.5)
    costs = Costs((1.0,) * p, (2.0,) * p, wires={"evict": wire, "load": wire})
    return Timeline.of(simulate(lower(build(name, p, m, chunks, bpipe, batches)), costs), name, m)


def are(path: Path, colour: Colour) -> Any:
    """Which pixels of the picture, by row and column, have the colour."""
    image = matplotlib.image.imread(path)[..., :3]
    return np.abs(image - colour).max(axis=-1) < 0.01


def pixels_of(path: Path, kind: str) -> int:
    return int(are(path, to_rgb(KINDS[kind].colour)).sum())


@pytest.mark.parametrize(
    ("name", "p", "m", "chunks", "bpipe"),
    [
        ("gpipe", 4, 8, 1, False),
        ("1f1b", 8, 16, 1, True),
        ("interleaved", 4, 8, 2, True),
        ("1f1b", 1, 1, 1, False),
        ("2bw", 4, 4, 1, True),
    ],
)
def test_one_timeline(tmp_path: Path, name: str, p: int, m: int, chunks: int, bpipe: bool) -> None:
    path = tmp_path / "timeline.png"
    draw_comparison(path, [timeline(name, p, m, chunks, bpipe)])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 8_000
    present = {"F", "B"} | ({"E", "L", "A", "R"} if bpipe else set()) | ({"U"} if name == "2bw" else set())
    assert {kind for kind in KINDS if pixels_of(path, kind)} == present


def test_backwards_take_twice_the_area_of_forwards(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    draw_comparison(path, [timeline("gpipe", 4, 4)])
    assert pixels_of(path, "B") / pixels_of(path, "F") == pytest.approx(2, rel=0.15)


def test_every_update_is_a_tick_in_its_place(tmp_path: Path) -> None:
    """Although it takes no time."""
    path = tmp_path / "timeline.png"
    stream = timeline("2bw", 4, 4, batches=3)
    draw_comparison(path, [stream])
    ticks = are(path, to_rgb(KINDS["U"].colour))
    legend, *stages = (rows for rows in np.split(ticks, np.flatnonzero(np.diff(ticks.any(axis=1))) + 1) if rows.any())
    assert legend.any()
    assert len(stages) == 4
    for spans, rows in zip(stream.stages, stages, strict=True):
        columns = np.flatnonzero(rows.any(axis=0))
        middles = [group.mean() for group in np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)]
        times = [span.start_ms for span in spans if span.action.kind == "U"]
        assert len(middles) == len(times) == 3
        # On one scale: stage 0's third ends the picture, where half of it is cut off.
        scale = (middles[1] - middles[0]) / (times[1] - times[0])
        assert middles[2] - middles[1] == pytest.approx(scale * (times[2] - times[1]), abs=3)


def test_every_second_weight_version_is_in_a_fuller_colour(tmp_path: Path) -> None:
    """Batches 0 and 1 run on W(0), 2 on W(1), 3 on W(2): a quarter of the boxes is fuller, until there is a W(3)."""
    path = tmp_path / "timeline.png"
    for batches, fuller in ((2, 0), (4, 1 / 4), (5, 2 / 5)):
        draw_comparison(path, [timeline("2bw", 4, 4, batches=batches)])
        plain, full = (are(path, shade("B", fullness))[200:].sum() for fullness in (0, 1))
        assert full / (full + plain) == pytest.approx(fuller, rel=0.05)


def test_transfers_cover_no_compute(tmp_path: Path) -> None:
    plain, levelled = tmp_path / "plain.png", tmp_path / "levelled.png"
    draw_comparison(plain, [timeline("1f1b", 4, 8)])
    draw_comparison(levelled, [timeline("1f1b", 4, 8, bpipe=True)])
    for kind in ("F", "B"):
        assert pixels_of(levelled, kind) == pixels_of(plain, kind)


def test_a_comparison_is_as_tall_as_its_parts(tmp_path: Path) -> None:
    timelines = [timeline("1f1b", 4, 8), timeline("1f1b", 4, 8, bpipe=True)]
    memory = [
        StageMemory("1f1b", "MiB", (40.0, 30.0, 20.0, 10.0), (40.5, 30.5, 20.5, 12.0)),
        StageMemory("1f1b with BPipe", "MiB", (30.0, 30.0, 20.0, 30.0)),
    ]
    heights = []
    for count, bars in ((1, []), (2, []), (2, memory)):
        draw_comparison(tmp_path / "comparison.png", timelines[:count], bars)
        heights.append(matplotlib.image.imread(tmp_path / "comparison.png").shape[0])
    assert heights == sorted(set(heights))


def test_nothing_to_draw_is_drawn_empty(tmp_path: Path) -> None:
    draw_comparison(tmp_path / "empty.png", [Timeline("empty", ((),))], [StageMemory("none", "MiB", (0.0,))])
    assert (tmp_path / "empty.png").exists()
