"""make gpu: what only a GPU can tell, measured in ten minutes; writes docs/gpu.json and the table in docs/gpu.md.

With several GPUs every stage has one, over NCCL; with one, four stages share it. Each part runs in processes of its
own, with a time limit; of one that fails the last line is recorded, and the others go on. Both files are written anew
after every part.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from evenpipe.upstream.installed import too_old_torch

from .gpus import usable, why_none
from .parts import carry_out, not_reached
from .registry import PARTS, ROOT, described, place_of
from .report import document, unchecked, why_not_writable, write

_SECONDS: Final = 590.0
_STAGES: Final = 4


def main() -> None:
    parser = argparse.ArgumentParser(prog="make gpu", description=(__doc__ or "").partition("\n")[0])
    places = ("cpu", "shared", "nccl-shared", "nccl")
    parser.add_argument("--place", choices=places, help="cpu: tries the parts out, on small sizes")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="parts (default: all)")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="the most that all parts take together")
    parser.add_argument("--into", type=Path, default=ROOT / "docs", help="folder of gpu.json and gpu.md")
    parser.add_argument("--list", action="store_true", help="say what the parts need and find, and do nothing")
    arguments = parser.parse_args()
    if arguments.list:
        print(described())
        return
    if (said := too_old_torch() or why_not_writable(arguments.into)) is not None:
        print(f"make gpu: {said}. Nothing was measured", file=sys.stderr)
        sys.exit(2)
    gpus, warned = usable()
    place = arguments.place or (place_of(gpus) if gpus else None)
    if place is None or (place != "cpu" and not gpus):
        sys.exit(f"make gpu: {why_none(warned)}. Nothing was measured, and nothing written")
    if place == "cpu" and arguments.into == ROOT / "docs":
        sys.exit("--place cpu: says nothing of GPUs, and must not be written into docs: name another folder by --into")
    ranks = 2 if place == "nccl" and gpus < _STAGES else _STAGES
    chosen = [part for part in PARTS if not arguments.only or part.name in arguments.only]
    began, entries = time.monotonic(), [not_reached(part) for part in chosen]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(chosen))
        for number, part in enumerate(chosen):
            bar.update(task, description=part.name)
            limit = began + arguments.seconds - time.monotonic()
            try:
                entry = carry_out(part, place, ranks, limit, lambda line: bar.console.print(line, markup=False))
            except KeyboardInterrupt:
                bar.stop()
                print(f"make gpu: interrupted after {number} parts, which are in {arguments.into}", file=sys.stderr)
                sys.exit(130)
            entries[number] = entry
            write(arguments.into, document(place, time.monotonic() - began, entries))
            bar.console.print(f"{part.name}: {entry['status']}, {entry['why'] or 'done'}", markup=False, style="bold")
            bar.advance(task)
    print("not checked:", *unchecked(entries), sep="\n  ")
    print(f"wrote gpu.json and the table of gpu.md in {arguments.into}")


if __name__ == "__main__":
    main()
