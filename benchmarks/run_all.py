"""Everything that README.md and docs/benchmarks.md show, measured again: results, pictures, pages.

Each script's document goes to `benchmarks/results`, once it is whole; a script that fails leaves its last result, and
the others go on. Then the pages are made from all results. Jobs that measure times (`timed`) want a machine that has
nothing else to do: scripts run one after the other, a result tells the load, and its page says so where that was above
the machine's cores. Commit first: results name the commit that they are of.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from again import AGAIN, made_again
from checkout import commit
from jobs import JOBS, ROOT, Job
from pages import RESULTS, pages, stored
from rich.console import Console


def run(job: Job, console: Console) -> bool:
    """Whether it ended well; its result is stored then."""
    if job.checkout and not os.environ.get("MEGATRON_LM"):
        console.print(f"{job.name}: left out: MEGATRON_LM names no Megatron-LM checkout")
        return False
    started = time.monotonic()
    ended = subprocess.run(job.arguments(), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    minutes = (time.monotonic() - started) / 60
    if ended.returncode:
        console.print(f"{job.name}: failed with {ended.returncode} after {minutes:.1f} min, its last result stays")
        return False
    if job.result:
        write(RESULTS / f"{job.name}.json", ended.stdout)
    console.print(f"{job.name}: {minutes:.1f} min")
    return True


def write(path: Path, text: str) -> None:
    """All of it, or nothing."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [job.name for job in JOBS]
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="(default: all; none: pages alone)")
    parser.add_argument(
        "--again", nargs="*", choices=list(AGAIN), help="measure nothing: their tables and pictures (default: all)"
    )
    arguments = parser.parse_args()
    again = arguments.again
    only = arguments.only if again is None else ()
    console = Console(stderr=True)
    jobs = [job for job in JOBS if job.name in only]
    if any(job.result for job in jobs) and commit().endswith("-dirty"):
        console.print(f"changes are not committed: results will be those of {commit()}, which nobody can check out")
    ended_well = True
    for number, job in enumerate(jobs, 1):
        left = sum(each.minutes for each in jobs[number - 1 :])
        console.print(f"[bold]{job.name}[/], {number} of {len(jobs)}, about {job.minutes:g} min; {left:g} to go")
        ended_well &= run(job, console)
    for job in JOBS:
        if again is not None and job.name in (again or AGAIN):
            path = RESULTS / f"{job.name}.json"
            picture = None if job.picture is None else ROOT / "docs" / job.picture
            write(path, made_again(job.name, json.loads(path.read_text()), picture))
    for path, text in pages(stored()).items():
        write(path, text)
    sys.exit(not ended_well)


if __name__ == "__main__":
    main()
