"""``evenpipe partition --megatron``: the layout for the flags of a run of Megatron's."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from evenpipe.cli.options import write
from evenpipe.cli.parser import UsageError
from evenpipe.partition.layouts import LayoutError, LayoutPlan, Split
from evenpipe.partition.layouts.best import best_layout
from evenpipe.partition.timing import RooflineError
from evenpipe.planner.descriptions import DescriptionError, device
from evenpipe.report.divisions import Division, draw_divisions
from evenpipe.report.files import write_atomically

__all__ = ["show_layout"]

_GIB: Final = 2**30


def show_layout(arguments: Namespace) -> None:
    """Print it, and write what is asked for. UsageError for flags that there is no layout for."""
    if find_spec("megatron") is None:
        raise UsageError("megatron-core is not installed: pip install 'evenpipe[megatron]'")
    if not arguments.flags:
        raise UsageError(
            "--megatron: which flags? Give those of the run after --: evenpipe partition --megatron -- ..."
        )
    limit_bytes = None if arguments.memory_gib is None else int(arguments.memory_gib * _GIB)
    if arguments.optimize == "swap+recompute":
        raise UsageError(
            "--optimize swap+recompute: Megatron's stages compute layers again, and swap nothing: recompute"
        )
    if arguments.optimize == "recompute" and limit_bytes is None:
        raise UsageError("--optimize recompute: as far as it takes to fit into what? Give --memory-gib")
    measured = arguments.device in (None, "cpu")
    console = Console(stderr=True)
    with console.status("timing layers" if measured else "reading flags") if console.is_terminal else nullcontext():
        try:
            found, profile = best_layout(
                arguments.flags,
                None if measured else device(arguments.device),
                limit_bytes=limit_bytes,
                half_layers=arguments.half_layers,
                recompute=arguments.optimize == "recompute",
            )
        except (LayoutError, RooflineError, DescriptionError) as error:
            raise UsageError(str(error)) from error
    document = json.dumps(found.to_json())
    write("--out", arguments.out, lambda path: write_atomically(path, document))
    write("--profile-out", arguments.profile_out, profile.write)
    stages = {"even": found.even, "chosen": found.best}
    write(
        "--picture",
        arguments.picture,
        lambda path: draw_divisions(path, found.layout, [_division(*one) for one in stages.items()]),
    )
    if arguments.json:
        print(document)
        return
    console = Console()
    console.print(_flag(found, arguments.out), style="bold", highlight=False, soft_wrap=True)
    console.print(_table(found))


def _flag(found: LayoutPlan, out: Path | None) -> str:
    """What to give the run. Megatron's own flags know whole layers only, and recompute as many on every stage."""
    path = "P.json, which --out P.json writes" if out is None else str(out)
    if found.best.halves:
        layers = ", ".join(map(str, found.best.cut_layers))
        return f"--evenpipe-partition {path} ('{found.layout}', cut between attention and MLP of layer {layers})"
    if any(stage.recompute_layers for stage in found.stages):
        again = ", ".join(str(stage.recompute_layers) for stage in found.stages)
        return f"--evenpipe-partition {path} ('{found.layout}', layers computed again by stage: {again})"
    return f"--pipeline-model-parallel-layout '{found.layout}'"


def _table(found: LayoutPlan) -> Table:
    """A row for each stage: the layout, and the even split."""
    proven = "no other is faster" if found.proven else "the best that was found"
    caption = (
        f"slowest {found.best.max_stage_ms:,.4g} ms, {proven}; even split {found.even.max_stage_ms:,.4g} ms; "
        f"times: {found.source}"
    )
    table = Table("stage", "layers", "ms", "peak GiB", "even split", "ms", "peak GiB", caption=caption)
    for number, pair in enumerate(zip(found.best.stages, found.even.stages, strict=True)):
        cells = (
            (", ".join(one.layers), f"{one.forward_ms + one.backward_ms:,.4g}", f"{one.peak_bytes / _GIB:.4g}")
            for one in pair
        )
        table.add_row(str(number), *(cell for row in cells for cell in row))
    return table


def _division(title: str, split: Split) -> Division:
    """A layout as the picture shows it: it saves no memory by recomputation or swapping."""
    peaks = [stage.peak_bytes for stage in split.stages]
    forward_ms, backward_ms = (
        [getattr(stage, time) for stage in split.stages] for time in ("forward_ms", "backward_ms")
    )
    return Division(title, forward_ms, backward_ms, [0.0] * len(peaks), peaks, peaks)
