"""The picture of the first page: memory of each stage without and with BPipe, speed over 1F1B. Of stored results."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pages import stored

__all__ = ["draw"]

_BEFORE, _AFTER, _TEXT = "#c9cbc7", "#2f6db5", "#2b2b2b"
_MIB: Final = 2**20


def draw(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write a PNG of two panels, 1,280 pixels wide."""
    figure = Figure(figsize=(9.85, 3.3), dpi=130, facecolor="white", layout="constrained")
    memory, speed = figure.subplots(1, 2, width_ratios=[1.25, 1])
    _memory(memory, max(results["memory"]["results"], key=lambda row: row["stages"]))
    of_network = {row["case"]: row for row in results["preempted_network"]["results"]}
    network = results["preempted_network"]["settings"] | of_network["half"]
    _speed(speed, max(results["bubbles"]["results"], key=lambda row: row["stages"]), network)
    figure.savefig(path)


def _memory(axes: Axes, row: dict[str, Any]) -> None:
    """Draw saved activations of every stage, in MiB: what --bpipe takes off the first stages."""
    stages = range(row["stages"])
    for shift, key, name, colour in ((-0.2, "1f1b", "1F1B", _BEFORE), (0.2, "bpipe", "1F1B --bpipe", _AFTER)):
        mib = [nbytes / _MIB for nbytes in row[f"{key}_peak_bytes"]]
        bars = axes.bar([stage + shift for stage in stages], mib, 0.4, color=colour, label=name)
        axes.bar_label(bars, [f"{value:.0f}" for value in mib], fontsize=7, color=_TEXT)
    axes.set_xticks(stages, [f"stage {stage}" for stage in stages], fontsize=7)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    axes.set_ylabel("MiB", fontsize=8, color=_TEXT)
    _finish(axes, "Saved activations: less on the first stages", f"a small GPT, {_sizes(row)}")


def _speed(axes: Axes, row: dict[str, Any], network: dict[str, Any]) -> None:
    """Draw samples a second, each over 1F1B in the same conditions, which stand under its bar."""
    few = _sizes(row)
    bars = {
        "1F1B": 1.0,
        f"kfkb, k = 2\n{_sizes(network)}\n{network['mbit']} Mbit/s (slow)": network["k2_speed_up"],
        f"zb-h1\n{few}": row["zb-h1_speed_up"],
        f"2bw\n{few}": row["2bw_speed_up"],
    }
    drawn = axes.bar(list(bars), list(bars.values()), 0.6, color=[_BEFORE, *[_AFTER] * 3])
    axes.bar_label(drawn, [f"× {value:.2f}" for value in bars.values()], fontsize=8, color=_TEXT)
    axes.tick_params(axis="x", labelsize=7)
    conditions = "compute is emulated; p: stages, m: micro-batches"
    _finish(axes, "Samples a second, 1F1B in the same conditions = 1", conditions)


def _sizes(row: dict[str, Any]) -> str:
    return f"p = {row['stages']}, m = {row['micro_batches']}"


def _finish(axes: Axes, title: str, condition: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=_TEXT)
    axes.set_xlabel(condition, fontsize=8, color=_TEXT)
    axes.set_yticks([])
    axes.margins(y=0.15)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--picture", type=Path, metavar="P.png", required=True)
    draw(parser.parse_args().picture, stored())


if __name__ == "__main__":
    main()
