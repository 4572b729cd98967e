"""The table at start: which stage sits where, and whether its link to its partner is fast enough for BPipe."""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Final

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from rich.console import Console, Group
from rich.text import Text

from evenpipe.megatron.schedule import PipelineSchedule
from evenpipe.megatron.script.needs import Need, compute_flops, recompute_scope, transfer_need
from evenpipe.megatron.script.placing import why_not_placed
from evenpipe.megatron.script.seats import Seat, Seating
from evenpipe.runtime.bandwidth import MeasuredPair, bandwidth_warnings
from evenpipe.runtime.gather import gather_text
from evenpipe.runtime.link_speed import sending_gbps
from evenpipe.runtime.placement import Placement
from evenpipe.settings import EvenPipeConfig, flag

__all__ = ["LinkTable"]

_WIDTH_OF_A_LOG: Final = 200
_NO_PAIRS: Final = ("no stage holds more micro-batches than BPipe's bound: nothing will be evicted",)


class LinkTable:
    """Measures each pair's links and prints, on rank 0, where stages sit, and what links need and have.

    `args` are Megatron's, `placement` is what `place_process` returned::

        PipelineSchedule(name, bpipe=True, connected=LinkTable(args, config, placement).report)
    """

    def __init__(self, args: Namespace, config: EvenPipeConfig, placement: Placement | None) -> None:
        self._args = args
        self._config = config
        self._placement = placement
        # Asked now: once torch.distributed is started, that alone would be a reason.
        self._why_not_placed = why_not_placed(args, config, os.environ) if placement is None else None

    def report(self, schedule: PipelineSchedule) -> None:
        """To be called by all ranks alike, once the links are open and before they are used; takes some 0.2 s.

        Does nothing without BPipe, where there are no pairs.
        """
        if not self._config.bpipe:
            return
        executor = schedule.executor
        assert executor is not None, "called when the links have been made"
        pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        host = socket.gethostname()
        seat = Seat(
            rank=dist.get_rank(),
            pipeline=pipeline[0],
            stage=executor.stage_index,
            # Agents are nodes, even where two of them share a machine.
            node=os.environ.get("GROUP_RANK", host),
            host=host,
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            flops=compute_flops(self._args, executor.device),
            sends_gbps=sending_gbps(executor.connections, executor.stage_index, executor.device),
        )
        texts = gather_text(json.dumps(seat))
        if texts is not None:
            chunks = self._args.virtual_pipeline_model_parallel_size or 1
            program = schedule.program(len(pipeline), get_num_microbatches(), chunks)
            _print(self.rendered([Seat(*json.loads(text)) for text in texts], program.schedule.evictions))

    def rendered(self, seats: Sequence[Seat], evictions: Sequence[int]) -> Group:
        """The table and the lines below it, for all seats of a job whose stages evict so many micro-batches each."""
        need = transfer_need(self._args, statistics.median(seat.flops for seat in seats))
        seating = Seating(seats, evictions)
        pairs = seating.pairs
        lines = (self._order(), *(_explained(seating, need) if pairs else _NO_PAIRS))
        return Group(
            Text("evenpipe: where stages sit, and what the links between partners carry", style="bold"),
            seating.table(need.strict_gbps),
            *(Text(f"  {line}") for line in lines),
            *(Text(f"  warning: {line}", style="yellow") for line in self._warnings(pairs, need)),
        )

    def _order(self) -> str:
        if self._placement is not None:
            return "ranks are placed pair-adjacent: partners are neighbours"
        return f"ranks are in Megatron's own order, not pair-adjacent: {self._why_not_placed}"

    def _warnings(self, pairs: Sequence[MeasuredPair], need: Need) -> tuple[str, ...]:
        recompute = (
            "use faster links" if recompute_scope(self._args) == "full" else "recompute more (--recompute-granularity)"
        )
        across = recompute
        if self._placement is None:
            across = f"see above what keeps {flag('pair_adjacent')} from joining partners on a node, or {recompute}"
        elif self._placement.gpus_per_node % 2 == 0:
            half = self._placement.gpus_per_node // 2
            across = f"choose a --tensor-model-parallel-size that divides {half}, or {recompute}"
        return bandwidth_warnings(pairs, need.strict_gbps, across_nodes=across, within_nodes=recompute)


def _explained(seating: Seating, need: Need) -> tuple[str, ...]:
    return (
        seating.summary(),
        f"needs: at most, estimated: {need.origin}; two thirds of it hide all but a part of the loads",
        "has: measured on these links just now, all pairs at once, in the direction in which the stage sends",
    )


def _print(printed: Group) -> None:
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_LOG
    console.print(printed, soft_wrap=True)
    sys.stdout.flush()
