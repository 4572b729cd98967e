"""EvenPipe's schedules beside those that one would use instead: time of a batch, and memory of the worst stage.

Every engine runs its own, unmodified code over real gloo, one process a stage, on the same emulated stages: a forward
sleeps 60 ms, the gradients of the input and of the weights 60 ms each, to deadlines; a micro-batch's message between
stages is 1 MiB, and a stage saves 1 MiB of it until its weights have their gradient. Eight processes on two cores lose
about 2 to 4 ms at each hop, which no accelerator would: the longer stages take, the less of a batch that is. Where
stages have two parts, each has half of the time and of what is saved. An action ends at max(end of the action before,
time at which what it waits for was there) + its duration.

    Megatron     megatron-core's forward_backward_pipelining_with(out)_interleaving
    torch        torch.distributed.pipelining
    DeepSpeed    PipelineEngine and DualPipeVEngine, with the optimizer's step
    EvenPipe     ModulePipeline, in plain torch

torchgpipe drives all devices from one process, which on CPU is one worker: its schedule is GPipe, as the others run it.
ZB-H1 and V-Half leave nothing to balance between stages, so there is no BPipe on them.

All take turns in the same processes, a batch a turn (where batches run into each other, the one in the middle of
three), so medians are of rounds. Memory is counted by finalisers of what the parts save; with BPipe, whose loads and
guests have memory of their own, by EvenPipe's counters, which elsewhere agree with these to the byte, as each run
checks.
"""

from __future__ import annotations

import argparse
import math
import warnings
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from emulation import Accelerator, clock_ms
from harness import Benchmark, Tick, prepare_to_fork, progress_bar, run_in_processes
from peer_engines import deepspeed_engine, evenpipe_engine, megatron_engine, torch_engine
from peer_engines.engine import Bench, Peer, Ran
from peer_engines.part import MIB, Live, Setting
from peer_engines.picture import case_of, draw, uneven
from rich.console import Group
from rich.table import Table
from sleeping_stages import follow_waits

from evenpipe.megatron.cpu_mode import cpu_mode

PEERS: Final[tuple[Peer, ...]] = (
    *megatron_engine.PEERS,
    *torch_engine.PEERS,
    *deepspeed_engine.PEERS,
    *evenpipe_engine.PEERS,
)
CASES: Final = ("4x4", "4x8", "4x16", "8x8", "8x16", "8x32")
# Long enough for every process to have left the broadcast of the start.
_START_DELAY_MS: Final = 20.0
_ONE_F_ONE_B: Final = "EvenPipe: 1F1B"
_BPIPE: Final = "EvenPipe: 1F1B + BPipe"
_STREAM: Final = "EvenPipe: 2BW"
#: Of the limit, that a stream without flushes is to reach even where a batch is only as long as the pipeline.
_PROMISED: Final = 0.95


def measure(rank: int, setting: Setting, names: list[str], repeats: int, tick: Tick) -> dict[str, Any]:
    """In each process: by peer milliseconds of a batch in every round, and the most bytes that any stage held."""
    warnings.simplefilter("ignore")
    cpu_mode().apply()
    megatron_engine.start(setting.stages)
    deepspeed_engine.start()
    accelerator = Accelerator(setting.forward_ms, setting.input_ms + setting.weight_ms)
    follow_waits(accelerator)
    bench = Bench(setting, rank, accelerator, Live())
    ran = {peer.name: peer.make(bench) for peer in PEERS if peer.name in names}
    times: dict[str, list[float]] = {name: [] for name in ran}
    held = dict[str, int]()
    for repeat in range(repeats + 1):
        for name, one in ran.items():
            took, peak = _turn(one, bench)
            if repeat:  # the first tells layouts and fills pools
                times[name].append(took)
                held[name] = max(peak, held.get(name, 0))
            tick()
    for one in ran.values():
        one.close()
    return {name: {"batches_ms": times[name], "bytes": held[name]} for name in ran}


def _turn(one: Ran, bench: Bench) -> tuple[float, int]:
    """Of a batch: from the common start, or the end of the one before, until the last stage is done; and the bytes.

    The largest of all processes, to which their own batches have begun and ended.
    """
    start = torch.tensor(clock_ms() + _START_DELAY_MS, dtype=torch.float64)
    dist.broadcast(start, 0)
    bench.accelerator.start(start.item())
    bench.live.reset()
    began = start.item()
    for _ in range(one.around):
        one.batch()
        began = clock_ms()
    one.batch()
    took = clock_ms() - began
    for _ in range(one.around):
        one.batch()
    found = torch.tensor([took, one.peak_bytes()], dtype=torch.float64)
    one.rest()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found[0].item(), int(found[1].item())


def entry(setting: Setting, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a case: a row for each peer."""
    shape = {"stages": setting.stages, "micro_batches": setting.micro_batches}
    if setting.uneven:
        shape["uneven"] = True
    rows = []
    for peer in PEERS:
        if peer.name in found:
            ms = median(found[peer.name]["batches_ms"])
            figures = {"ms": ms, "of_limit": setting.least_ms / ms, "mib": found[peer.name]["bytes"] / MIB}
            about = {"peer": peer.name, "engine": peer.engine, "delayed": peer.delayed}
            rows.append({**shape, **about, **figures, **found[peer.name]})
    for row in rows:
        # What trains by the same rule: a delay of the gradient is paid for in another coin.
        rivals = [other for other in rows if row["delayed"] or not other["delayed"]]
        row["front"] = not any(_beats(other, row) for other in rivals)
    return rows


def _beats(other: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether it is as good in both, and better in one."""
    theirs, mine = ((one["of_limit"], -one["mib"]) for one in (other, row))
    return theirs != mine and all(their >= my for their, my in zip(theirs, mine, strict=True))


def findings(rows: list[dict[str, Any]]) -> list[str]:
    """What a case says of the fastest schedule, of the smallest not slower than 1F1B, and of what 2BW is to reach."""
    by_name = {row["peer"]: row for row in rows}
    fastest = max(rows, key=lambda row: row["of_limit"])
    said = [f"highest throughput: {fastest['peer']}, {_share(fastest)} of the limit without bubbles"]
    if _ONE_F_ONE_B in by_name and _BPIPE in by_name:
        stock, bpipe = by_name[_ONE_F_ONE_B], by_name[_BPIPE]
        compared = bpipe["of_limit"] / stock["of_limit"]
        enough = [row for row in rows if row["of_limit"] >= 0.99 * stock["of_limit"]]
        least = min(row["mib"] for row in enough)
        smallest = ", ".join(row["peer"] for row in enough if row["mib"] == least)
        said += [
            f"least memory, {least:.1f} MiB, with ≥ 0.99 of 1F1B's throughput: {smallest}",
            f"1F1B + BPipe: {bpipe['mib']:.1f} MiB with {compared:.3f} of 1F1B's throughput",
        ]
    stages, micro_batches, parts = rows[0]["stages"], rows[0]["micro_batches"], uneven(rows[0])
    if _STREAM in by_name and stages == micro_batches:
        verdict = "holds" if by_name[_STREAM]["of_limit"] >= _PROMISED else "does not hold"
        said.append(f"2BW at m = p: {_share(by_name[_STREAM])} of the limit; ≥ {_PROMISED}: {verdict}")
    return [f"p={stages}, m={micro_batches}{parts}: {line}" for line in said]


def _share(row: dict[str, Any]) -> str:
    """Of the limit, cut off and not rounded: what misses a bound does not look as if it reached it."""
    return f"{math.floor(1e4 * row['of_limit']) / 1e4:.4f}"


def table(results: list[dict[str, Any]]) -> Group:
    """The same for people."""
    shown = Table("p", "m", "", "ms", "of the limit", "worst stage, MiB", "on the front of")
    said = Table("found")
    for (stages, micro_batches, _), group in groupby(results, key=case_of):
        rows = list(group)
        for row in rows:
            shown.add_row(
                str(stages),
                f"{micro_batches}{uneven(row)}",
                row["peer"],
                f"{row['ms']:,.0f}",
                _share(row),
                f"{row['mib']:.1f}",
                ("late gradients" if row["delayed"] else "stock rule") if row["front"] else "",
            )
        shown.add_section()
        for line in findings(rows):
            said.add_row(line)
    return Group(shown, said)


def _case(text: str) -> tuple[int, int, bool]:
    sizes, _, uneven = text.partition(",")
    stages, _, micro_batches = sizes.partition("x")
    if not (stages.isdigit() and micro_batches.isdigit() and uneven in ("", "uneven")):
        raise argparse.ArgumentTypeError(f"{text}: is no case: give stages x micro-batches, such as 4x8 or 4x8,uneven")
    return int(stages), int(micro_batches), bool(uneven)


def main() -> None:
    benchmark = Benchmark("peers", __doc__ or "", repeats=5)
    add = benchmark.parser.add_argument
    add(
        "--cases",
        type=_case,
        nargs="+",
        default=[_case(text) for text in CASES],
        metavar="PxM[,uneven]",
        help=f"(default {' '.join(CASES)})",
    )
    add("--only", nargs="+", metavar="TEXT", default=[""], help="peers whose names contain one of these (default: all)")
    add("--forward-ms", type=float, default=60.0, help="and either half of a backward (default 60)")
    add("--saved-mib", type=float, default=1.0, help="saved by one micro-batch on a stage (default 1)")
    add("--picture", type=Path, metavar="P.png", help="memory against throughput")
    arguments = benchmark.parser.parse_args()
    if not any(text in peer.name for peer in PEERS for text in arguments.only):
        benchmark.parser.error(f"--only {' '.join(arguments.only)}: no peer has such a name")
    prepare_to_fork()
    results = []
    for stages, micro_batches, is_uneven in arguments.cases:
        each, saved = arguments.forward_ms, int(arguments.saved_mib * MIB)
        setting = Setting(stages, micro_batches, each, each, each, saved, is_uneven)
        peers = [
            peer
            for peer in PEERS
            if peer.why_not(setting) is None and any(text in peer.name for text in arguments.only)
        ]
        for peer in peers:
            peer.prepare(setting)
        names = [peer.name for peer in peers]
        with progress_bar(
            f"{stages} stages, {micro_batches} micro-batches", len(names) * (arguments.repeats + 1)
        ) as tick:
            found = run_in_processes(
                stages, measure, setting, names, arguments.repeats, tick=tick, enter=deepspeed_engine.quiet
            )
        results += entry(setting, found)
    if arguments.picture is not None:
        draw(arguments.picture, results)
    settings = {"forward_ms": arguments.forward_ms, "repeats": arguments.repeats, "saved_mib": arguments.saved_mib}
    benchmark.report(settings, results, table(results))


if __name__ == "__main__":
    main()
