"""Measure what each correction of the delay costs 2BW in time: a batch with it, and without, on emulated stages.

As `bubbles.py`: a tiny megatron-core GPT in Megatron's training step, one process a stage, each of which sleeps for the
rest of the time that an accelerator would take, to deadlines. The variants take turns in the same processes. Figures
are medians over rounds, on the slowest stage. So a correction that made a stage wait for another would show. Its own
passes over the weights would not: those of so small a model take no time.
"""

from __future__ import annotations

from statistics import median
from typing import get_args

from bubbles import MODEL, Variant, in_turns, options_of
from emulation import Accelerator
from flushes import Setting, add_flags, common, settings_of
from harness import Benchmark, Tick, prepare_to_fork, progress_bar, run_in_processes
from rich.table import Table

from evenpipe.schedule import DelayCorrection

CORRECTIONS: tuple[str, ...] = get_args(DelayCorrection)
CASES = ("4x4",)


def measure(rank: int, setting: Setting, tick: Tick) -> dict[str, list[float]]:
    """In each process: milliseconds of a batch in every round, per correction."""
    options = options_of(setting)

    def make(accelerator: Accelerator) -> dict[str, Variant]:
        each = {name: options.model_copy(update={"delay_correction": name}) for name in CORRECTIONS}
        return {name: Variant("2bw", corrected, accelerator, rank) for name, corrected in each.items()}

    return in_turns(setting, make, tick)


def main() -> None:
    benchmark = Benchmark("corrections", __doc__, repeats=5)
    add_flags(benchmark, CASES)
    arguments = benchmark.parser.parse_args()
    prepare_to_fork()
    results = []
    shown = Table("stages", "m", "correction", "ms", "speed of 2BW's without")
    for setting in settings_of(arguments):
        with progress_bar(f"{setting.stages} stages", len(CORRECTIONS) * setting.repeats) as tick:
            times = run_in_processes(setting.stages, measure, setting, tick=tick)
        middle = {name: median(rounds) for name, rounds in times.items()}
        for name, ms in middle.items():
            entry = {"stages": setting.stages, "micro_batches": setting.micro_batches, "correction": name, "ms": ms}
            results.append(entry | {"speed": middle["none"] / ms, "rounds_ms": times[name]})
            shown.add_row(
                str(setting.stages), str(setting.micro_batches), name, f"{ms:,.0f}", f"{middle['none'] / ms:.3f}"
            )
    benchmark.report(common(arguments) | {"model": MODEL}, results, shown)


if __name__ == "__main__":
    main()
