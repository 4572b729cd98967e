"""What `run_all.py` measures and draws, in this order."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["JOBS", "ROOT", "Job"]

ROOT: Final = Path(__file__).parents[1]


class Job(NamedTuple):
    """One result and its picture; `minutes` are about those it took on 2 cores.

    `timed`: its results are times of this machine, which others that keep it busy make longer; what the other jobs find
    by simulations, searches and counts, or by training, is the same under any load. `checkout`: it takes --megatron-lm,
    the first checkout that MEGATRON_LM names. A job without a result only draws.
    """

    name: str
    minutes: float
    command: tuple[str, ...]
    picture: str | None = None
    checkout: bool = False
    result: bool = True
    timed: bool = False

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
NEXT_TO_NO_BUBBLE: Final = (
    *("--cases", "8x16", "8x16,uneven"),
    *(
        "--only",
        "EvenPipe: 1F1B",
        "ZBV",
        "EvenPipe: ZB-H",
        "V-Half",
        "torch: DualPipeV",
        "EvenPipe: DualPipeV",
        "searched",
    ),
)
SMALL: Final = ("--cases", "4x4", "8x8", "--repeats", "3", "--batches", "6")
JOBS: Final = (
    Job("demo", 0.5, (*EVENPIPE, "demo"), result=False),
    Job("page", 0.2, script("page_picture"), "report.png", result=False),  # of the page that the demo has written
    Job(
        "partition",
        0.5,
        (*EVENPIPE, "partition", *T5, "--mode", "async", "--optimize", "swap+recompute"),
        "partition.png",
        result=False,
    ),
    Job("memory", 0.5, script("memory")),
    Job("bpipe_overlap", 2, script("bpipe_overlap"), timed=True),
    Job("overhead", 3, script("overhead"), timed=True),
    Job("peers", 60, script("peers"), "peers.png", timed=True),
    Job("zero_bubble_peers", 10, script("peers", *NEXT_TO_NO_BUBBLE), timed=True),
    Job("bubbles", 8, script("bubbles"), timed=True),
    Job("corrections", 1, script("corrections"), timed=True),
    Job("bubbles_in_a_script", 6, script("bubbles", *SMALL), checkout=True, timed=True),
    Job("deepspeed_bubbles", 10, script("deepspeed_bubbles"), timed=True),
    Job("megatron_lm", 5, script("megatron_lm"), checkout=True, timed=True),
    Job("preempted_network", 18, script("preempted_network"), "kfkb_adaptive.png", timed=True),
    Job("convergence", 12, script("convergence"), "2bw_convergence.png"),
    Job("orders", 4, script("orders")),
    Job("reach", 0.1, script("reach")),
    Job("front", 8, script("front"), "front.png"),
    Job("building_blocks", 2, script("building_blocks", "--stages", "8", "--times", "2")),
    Job("evictions", 8, script("evictions")),
    Job("swaps", 1, script("evictions", "--stages", "4")),
    Job("capped", 2, script("capped"), timed=True),
    Job("max_batch", 30, script("max_batch", "--optimized", "none", "S+R")),
    Job("imbalance", 4, script("imbalance")),
    Job("partition_speed", 15, script("partition_speed", "--simulated", "--points", "5")),
    Job("planned_times", 4, script("planned_times"), timed=True),
    Job("search_times", 4, script("search_times"), timed=True),
    Job("planner_truth", 1, script("planner_truth")),
    Job("figures_bpipe", 1, script("figures_bpipe"), "figures_bpipe.png"),
    Job("figures_2bw", 1, script("figures_2bw"), "figures_2bw.png"),
    Job("figures_ada_grouper", 1, script("figures_ada_grouper"), "figures_ada_grouper.png"),
    Job("gain", 0.1, script("gain_picture"), "gain.png", result=False),
    Job("scale", 10, script("scale"), "scale.png", timed=True),
)
