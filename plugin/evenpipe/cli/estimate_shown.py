"""What an estimate says, as text or as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from evenpipe.planner.descriptions import Cluster, Model
from evenpipe.planner.estimate import Estimate

__all__ = ["show"]

_GIB: Final = 2**30


def show(
    shown: Estimate, of: Model, nodes: Cluster, as_json: bool, spelt: Callable[[str], str] = str, *notes: str
) -> None:
    """Print it. ``spelt`` writes the flags in its lines as whoever asks knows them; ``notes`` come before warnings."""
    document = shown.to_json()
    document["reason"] = None if shown.reason is None else spelt(shown.reason)
    document["warnings"] = [*notes, *map(spelt, shown.warnings)]
    if as_json:
        print(json.dumps(document))
        return
    _print(shown, of, nodes, [*([document["reason"]] if shown.reason else []), *document["warnings"]])


def _print(shown: Estimate, of: Model, nodes: Cluster, lines: list[str]) -> None:
    console = Console()
    run = shown.run
    more = {"context": run.context, "experts": run.expert, "model chunks": run.chunks}
    further = "".join(f"{name} {size}, " for name, size in more.items() if size > 1)
    title = (
        f"{of.name} on {nodes.name}: tensor {run.tensor}, {run.stages} stages, data {run.data}, {further}micro-batches "
        f"of {run.micro_batch}, {run.schedule}{' with BPipe' if run.bpipe else ''}, recompute {run.recompute}"
    )
    console.print(title, style="bold", highlight=False)
    columns = ("weights", "grads", "optim", "saved", "buffers", "comm", "total")
    caption = f"GiB, of {nodes.device.memory_gib:g}; milliseconds of a micro-batch"
    heads = ("stage", *columns, "forward", "backward")
    table = Table(*heads, caption=caption, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for number, stage in enumerate(shown.stages):
        held = [f"{nbytes / _GIB:.2f}" for nbytes in (*stage.bytes, stage.bytes.total)]
        table.add_row(str(number), *held, f"{stage.forward_ms:.4g}", f"{stage.backward_ms:.4g}")
    console.print(table)
    sure = shown.uncertainty
    console.print(
        f"{'fits' if shown.fits else 'does not fit'}; iteration {shown.iteration_ms:,.0f} ms ({sure}: "
        f"{sure.meaning}), {shown.samples_per_second:.2f} samples/s, MFU {shown.mfu:.1%}",
        highlight=False,
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
