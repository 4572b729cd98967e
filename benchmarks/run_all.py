"""Everything that README.md and docs/benchmarks.md show, measured again: results, pictures, pages.

Each script's document goes to `benchmarks/results`, once it is whole; a script that fails leaves its last result, and
the others go on. Then the pages are made from all results. Times want a machine that has nothing else to do: scripts
run one after the other, and a result tells the load.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

from again import AGAIN, made_again
from pages import RESULTS, ROOT, pages, stored
from rich.console import Console


class Job(NamedTuple):
    """One result and its picture; `minutes` are about those it took on 2 cores.

    `checkout`: it takes --megatron-lm, the first checkout that MEGATRON_LM names. A job without a result only draws.
    """

    name: str
    minutes: float
    command: tuple[str, ...]
    picture: str | None = None
    checkout: bool = False
    result: bool = True

    def arguments(self) -> list[str]:
        """The command line."""
        drawn = [] if self.picture is None else ["--picture", f"docs/{self.picture}"]
        checkout = ["--megatron-lm", os.environ["MEGATRON_LM"].partition(os.pathsep)[0]] if self.checkout else []
        return [sys.executable, *self.command, *checkout, *drawn, *(["--json"] if self.result else [])]


def script(name: str, *arguments: str) -> tuple[str, ...]:
    """One of this folder, with its arguments."""
    return (str(ROOT / "benchmarks" / f"{name}.py"), *arguments)


EVENPIPE: Final = ("-m", "evenpipe")
T5: Final = ("--model", "t5-v1.1-large", "--stages", "8", "--micro-batch-size", "16", "--memory-gib", "40")
SMALL: Final = ("--cases", "4x4", "8x8", "--repeats", "3", "--batches", "6")
JOBS: Final = (
    Job("demo", 0.5, (*EVENPIPE, "demo"), "demo.png", result=False),
    Job("page", 0.2, script("page_picture"), "report.png", result=False),  # of the page that the demo has written
    Job(
        "partition",
        0.5,
        (*EVENPIPE, "partition", *T5, "--mode", "async", "--optimize", "swap+recompute"),
        "partition.png",
        result=False,
    ),
    Job("memory", 0.5, script("memory")),
    Job("bpipe_overlap", 2, script("bpipe_overlap")),
    Job("overhead", 3, script("overhead")),
    Job("peers", 46, script("peers"), "peers.png"),
    Job("bubbles", 8, script("bubbles")),
    Job("bubbles_in_a_script", 6, script("bubbles", *SMALL), checkout=True),
    Job("deepspeed_bubbles", 10, script("deepspeed_bubbles")),
    Job("megatron_lm", 5, script("megatron_lm"), checkout=True),
    Job("preempted_network", 18, script("preempted_network"), "kfkb_adaptive.png"),
    Job("convergence", 12, script("convergence"), "2bw_convergence.png"),
    Job("orders", 4, script("orders")),
    Job("max_batch", 30, script("max_batch", "--optimized", "none", "S+R")),
    Job("imbalance", 4, script("imbalance")),
    Job("partition_speed", 15, script("partition_speed", "--simulated", "--points", "5")),
    Job("planned_times", 4, script("planned_times")),
    Job("search_times", 4, script("search_times")),
    Job("planner_truth", 1, script("planner_truth")),
    Job("figures_bpipe", 1, script("figures_bpipe"), "figures_bpipe.png"),
    Job("figures_2bw", 1, script("figures_2bw"), "figures_2bw.png"),
    Job("figures_ada_grouper", 1, script("figures_ada_grouper"), "figures_ada_grouper.png"),
    Job("scale", 10, script("scale"), "scale.png"),
)


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
