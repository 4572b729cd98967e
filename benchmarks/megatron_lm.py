"""What EvenPipe's flags cost an unmodified pretrain_gpt.py of Megatron-LM: at its start, and in every iteration.

Measured: seconds from the launch of torchrun to the first line in the log, that of iteration 10, and the time of an
iteration as the following lines give it, each for ten. On: a small GPT on CPU over gloo, one process for each of
its (by default two) stages, from the checkout of Megatron-LM that is named. Jobs with and without EvenPipe's flags take
turns; each time their order is reversed.

    stock        no flag of EvenPipe
    evenpipe     --evenpipe-schedule 1f1b

A ratio is the median over repeats of the quotient of the two jobs of one repeat; the start is the median of their
difference. Beside each stand the least and the most: as long as one lies on each side of none, nothing is to be seen.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from harness import Benchmark, positive, progress_bar
from rich.table import Table

VARIANTS: Final[dict[str, tuple[str, ...]]] = {"stock": (), "evenpipe": ("--evenpipe-schedule", "1f1b")}
LOG_INTERVAL: Final = 10
LINE: Final = re.compile(r"iteration\s+(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)")


class Job(NamedTuple):
    """One job: seconds to its first line, and milliseconds of an iteration by each line after it."""

    start_s: float
    iterations_ms: list[float]


def job(checkout: Path, shape: dict[str, int], flags: tuple[str, ...]) -> Job:
    """Train once. Raises SystemExit with what the job printed when it fails."""
    stages = shape["stages"]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(stages)),
        *("-m", "evenpipe", "run", "--cpu", "pretrain_gpt.py"),
        *("--pipeline-model-parallel-size", str(stages), "--num-layers", str(shape["layers"])),
        *(
            "--hidden-size",
            str(shape["hidden"]),
            "--num-attention-heads",
            "4",
            "--seq-length",
            str(shape["seq_length"]),
        ),
        *("--max-position-embeddings", str(shape["seq_length"]), "--micro-batch-size", "1", "--global-batch-size", "8"),
        *("--train-iters", str(shape["iterations"]), "--lr", "1e-3", "--lr-decay-style", "constant"),
        *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "8192", "--num-workers", "0"),
        *("--log-interval", str(LOG_INTERVAL), "--eval-iters", "0", "--eval-interval", "1000", *flags),
    ]
    path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    began, first, found, lines = time.monotonic(), None, [], []
    process = subprocess.Popen(
        command, cwd=checkout, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        match = LINE.search(line)
        if match:
            first = time.monotonic() - began if first is None else first
            found.append(float(match[2]))
    if process.wait() or first is None:
        raise SystemExit("".join(lines[-40:]))
    return Job(first, found[1:])


def result(jobs: dict[str, list[Job]]) -> dict[str, Any]:
    """The entry of the document."""
    stock, ours = jobs["stock"], jobs["evenpipe"]
    ratios = [median(a.iterations_ms) / median(b.iterations_ms) for a, b in zip(ours, stock, strict=True)]
    starts = [a.start_s - b.start_s for a, b in zip(ours, stock, strict=True)]
    entry: dict[str, Any] = {
        "iteration_ratio": median(ratios),
        "start_difference_s": median(starts),
        "iteration_ratios": ratios,
        "start_differences_s": starts,
    }
    for name, mine in jobs.items():
        entry[f"{name}_iteration_ms"] = median(median(one.iterations_ms) for one in mine)
        entry[f"{name}_start_s"] = median(one.start_s for one in mine)
    return entry


def table(entry: dict[str, Any]) -> Table:
    """The same for people."""
    shown = Table("", "stock", "evenpipe", "compared, median of pairs", "least … most")
    ratios, starts = entry["iteration_ratios"], entry.get("start_differences_s", ())  # older results have none
    shown.add_row(
        "iteration",
        *(f"{entry[f'{name}_iteration_ms']:,.1f} ms" for name in VARIANTS),
        f"× {entry['iteration_ratio']:.3f}",
        f"{min(ratios):.3f} … {max(ratios):.3f}",
    )
    shown.add_row(
        "to the first line",
        *(f"{entry[f'{name}_start_s']:.2f} s" for name in VARIANTS),
        _signed(entry["start_difference_s"]),
        f"{_signed(min(starts))} … {_signed(max(starts))}" if starts else "",
    )
    return shown


def _signed(seconds: float) -> str:
    return f"{'−' if seconds < 0 else '+'} {abs(seconds):.2f} s"


def main() -> None:
    benchmark = Benchmark("megatron_lm", __doc__, repeats=5)
    shape = {"stages": 2, "layers": 4, "hidden": 128, "seq-length": 128, "iterations": 50}
    for name, default in shape.items():
        benchmark.parser.add_argument(f"--{name}", type=positive, default=default, help=f"(default {default})")
    benchmark.parser.add_argument("--megatron-lm", type=Path, metavar="PATH", required=True, help="a checkout")
    arguments = benchmark.parser.parse_args()
    checkout: Path = arguments.megatron_lm.resolve()
    if not (checkout / "pretrain_gpt.py").exists():
        benchmark.parser.error(f"--megatron-lm {checkout}: has no pretrain_gpt.py: name a Megatron-LM checkout")
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "megatron_lm")}
    jobs: dict[str, list[Job]] = {name: [] for name in VARIANTS}
    turns = list(VARIANTS.items())
    with progress_bar("jobs", len(VARIANTS) * arguments.repeats) as tick:
        for _ in range(arguments.repeats):
            for name, flags in turns:
                jobs[name].append(job(checkout, settings, flags))
                tick()
            turns.reverse()
    entry = result(jobs)
    benchmark.report(settings | {"checkout": checkout.name}, [entry], table(entry))


if __name__ == "__main__":
    main()
