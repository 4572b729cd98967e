"""The table at start: which stage sits where, and whether its link to its partner is fast enough for BPipe."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from rich.console import Group

from evenpipe.megatron.schedule import PipelineSchedule
from evenpipe.megatron_lm.log import say
from evenpipe.report.bandwidth import (
    JobLayout,
    ModelShape,
    Need,
    ProcessLocation,
    Recompute,
    estimated_need,
    print_for_a_log,
)
from evenpipe.runtime.exchange import gather
from evenpipe.runtime.placement import NotPlacedError, Placement
from evenpipe.runtime.timing import matrix_flops, sending_gbps
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.settings.spelling import flag

__all__ = ["LinkTable", "compute_flops", "recompute_scope", "transfer_need"]

# A device is as fast with more rows or columns; these are allocated at once.
_MOST_ROWS: Final = 4096
_MOST_COLUMNS: Final = 4096


class LinkTable:
    """Measures each pair's links and prints, on rank 0, where stages sit, and what links need and have.

    `args` are Megatron's, `placement` is what `place_process` returned::

        PipelineSchedule(name, bpipe=True, connected=LinkTable(args, config, placement).report)
    """

    def __init__(self, args: Namespace, config: EvenPipeConfig, placement: Placement | NotPlacedError) -> None:
        self._args = args
        self._config = config
        self._placement = placement

    def report(self, schedule: PipelineSchedule) -> None:
        """To be called by all ranks alike, once the links are open and before they are used; takes some 0.2 s.

        Without BPipe, where there are no pairs, only a line says how many links there are, and what they take.
        """
        executor = schedule.executor
        assert executor is not None, "called when the links have been made"
        if dist.get_rank() == 0:
            say(executor.connections.line)
        if not self._config.bpipe:
            return
        pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        flops = compute_flops(self._args, executor.device)
        gbps = sending_gbps(executor.connections, executor.stage_index, executor.device)
        processes = gather(ProcessLocation.of_this(dist.get_rank(), pipeline[0], executor.stage_index, gbps, flops))
        if processes is not None:
            chunks = self._args.virtual_pipeline_model_parallel_size or 1
            program = schedule.program(len(pipeline), get_num_microbatches(), chunks, self._args)
            print_for_a_log(self.rendered([ProcessLocation(*each) for each in processes], program.schedule.evictions))

    def rendered(self, processes: Sequence[ProcessLocation], evictions: Sequence[int]) -> Group:
        """The table and the lines below it, for a job's processes, whose stages evict so many micro-batches each."""
        layout = JobLayout(processes, evictions)
        need = transfer_need(self._args, statistics.median(process.flops for process in processes))
        return layout.rendered(need, self._order(), *self._remedies())

    def _order(self) -> str:
        if isinstance(self._placement, NotPlacedError):
            return f"ranks are in Megatron's own order, not pair-adjacent: {self._placement}"
        return "ranks are placed pair-adjacent: partners are neighbours"

    def _remedies(self) -> tuple[str, str]:
        """Return what to do about slow links between nodes, and within one."""
        recompute = (
            "use faster links" if recompute_scope(self._args) == "full" else "recompute more (--recompute-granularity)"
        )
        across = recompute
        if isinstance(self._placement, NotPlacedError):
            across = f"see above what keeps {flag('pair_adjacent')} from joining partners on a node, or {recompute}"
        elif self._placement.gpus_per_node % 2 == 0:
            half = self._placement.gpus_per_node // 2
            across = f"choose a --tensor-model-parallel-size that divides {half}, or {recompute}"
        return across, recompute


def compute_flops(args: Namespace, device: torch.device) -> float:
    """Floating-point operations per second of `device` in a matrix product of the model's shape and type."""
    rows = args.seq_length // args.context_parallel_size * args.micro_batch_size
    columns = 4 * args.hidden_size // args.tensor_model_parallel_size
    return matrix_flops(device, args.params_dtype, min(rows, _MOST_ROWS), args.hidden_size, min(columns, _MOST_COLUMNS))


def transfer_need(args: Namespace, flops: float) -> Need:
    """Return what a transfer of a micro-batch's saved activations needs, if a forward runs at `flops` all the time."""
    shape = ModelShape(args.num_layers, args.num_attention_heads, args.hidden_size, args.seq_length)
    return estimated_need(
        shape,
        args.pipeline_model_parallel_size,
        args.tensor_model_parallel_size,
        # Context-parallel ranks share a micro-batch's sequence as they would share its samples.
        args.micro_batch_size / args.context_parallel_size,
        recompute_scope(args),
        sequence_parallel=args.sequence_parallel,
        fp32=args.params_dtype == torch.float32,
        flops=flops,
    )


def recompute_scope(args: Namespace) -> Recompute:
    """Return what Megatron's arguments have recomputed; fused attention saves as little as recomputed attention."""
    if args.recompute_granularity == "full":
        return "full"
    recomputed = args.recompute_granularity == "selective" and "core_attn" in (args.recompute_modules or ["core_attn"])
    backend = getattr(getattr(args, "attention_backend", None), "name", "auto")
    fused = args.transformer_impl == "transformer_engine" and backend in ("auto", "flash", "fused")
    return "selective" if recomputed or fused else "none"
