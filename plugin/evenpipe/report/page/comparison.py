"""Runs of one model side by side: whether they compute the same, what they hold, and what they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from evenpipe.report.page.content import Table, View, amount
from evenpipe.report.page.documents import RunDocument
from evenpipe.report.typical import median_ms

__all__ = ["DIFFERENT", "SAME", "busy", "compared", "comparison_view"]

SAME: Final = "bit-identical"
DIFFERENT: Final = "DIFFERENT"
_MIB: Final = 2**20


def compared(runs: Mapping[str, RunDocument]) -> Table:
    """A column a run; losses and weights against those of the first."""
    first, *others = runs.values()
    rows = [("last loss", *(_last_loss(run) for run in runs.values()))]
    rows.append(("all losses", "reference", *(_sameness(first.losses_hex, run.losses_hex) for run in others)))
    rows.append(
        ("final weights", "reference", *(_sameness(first.weights_sha256, run.weights_sha256) for run in others))
    )
    for number in range(min(len(run.stages) for run in runs.values())):
        peaks = (run.stages[number].peak_saved_bytes / _MIB for run in runs.values())
        rows.append((f"stage {number}: peak saved", *(f"{peak:.2f} MiB" for peak in peaks)))
    rows.append(("median iteration", *(f"{median_ms(run.iteration_ms):.0f} ms" for run in runs.values())))
    name = next(iter(runs))
    caption = f"{SAME}: equal to {name} in every bit, over all iterations; median: of all iterations but the first"
    return Table(caption, ("", *runs), rows)


def comparison_view(runs: Mapping[str, RunDocument], machine: Any) -> View:
    """How a page of several runs begins. ``machine``: what a document says of it, if anything."""
    table = compared(runs)
    facts = [
        (f"{row[0].capitalize()}, of {len(runs)} runs", "; ".join(dict.fromkeys(row[2:])))
        for row in table.rows
        if row[1] == "reference" and len(row) > 2
    ]
    facts += [
        (f"Fullest stage, {name}", amount(max(stage.peak_saved_bytes for stage in run.stages)))
        for name, run in runs.items()
    ]
    return View("Side by side", facts, (), table, notes=list(busy(machine)))


def busy(machine: Any) -> Iterator[str]:
    """A line where more was running before the runs than there are cores; ``machine``: load_before and cores."""
    if not isinstance(machine, dict):
        return
    load, cores = machine.get("load_before"), machine.get("cores")
    if isinstance(load, int | float) and isinstance(cores, int | float) and load > cores:
        yield (
            f"The machine was busy before the first run started: a load of {load:.1f} on "
            f"{cores:g} {'core' if cores == 1 else 'cores'}. Times are not those of an idle one, and compare badly."
        )


def _last_loss(run: RunDocument) -> str:
    loss = run.losses[-1] if run.losses else None
    return "" if loss is None else f"{loss:.6f}"


def _sameness(reference: Any, other: Any) -> str:
    if reference is None or other is None:
        return "not recorded"
    return SAME if reference == other else DIFFERENT
