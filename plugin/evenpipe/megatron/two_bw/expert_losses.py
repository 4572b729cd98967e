"""The auxiliary losses of experts under 2BW: of each batch apart, and summed over the stages in the background."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from evenpipe.runtime.heartbeat import job_timeout, wait_for

__all__ = ["ExpertLosses", "forget_model"]


class ExpertLosses:
    """The sums that Megatron's routers make for the log, of each batch apart.

    Megatron has one sum, which it adds up over all stages in every iteration, and clears. Under 2BW, stages forward the
    first micro-batches of the next batch by then, and a sum over them would join all stages. So each batch has its own
    here. The sum over stages is started where the stages exchange the figures of the batch (`gather`), and the log has
    it an iteration later, as it has the gradient norm. The first iteration's is not a number, and so are means with
    it, which Megatron leaves out of its log.
    """

    def __init__(self) -> None:
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        self._alone = dist.new_group([dist.get_rank()], timeout=job_timeout(), use_local_synchronization=True)
        self._of: dict[int, dict[str, Tensor]] = {}  # by batch and name: a number for each layer of the whole model
        self._present: int | None = None
        self._names: dict[str, Tensor] = {}  # in one order on all ranks, once Megatron has told; zeros
        self._summed: dict[str, Tensor] = {}
        self._works: list[dist.Work] = []

    def use(self, batch: int) -> None:
        """Sum for `batch` from now on."""
        if batch == self._present:
            return
        self._put_away()
        self._present = batch
        kept = self._of.setdefault(batch, {})
        for name, values in _tracked().items():
            values.copy_(kept.get(name, torch.zeros_like(values)))

    def drop(self, first: int) -> None:
        """Forget `first` and later batches, whose forwards will be computed again."""
        self._put_away()
        self._of = {batch: values for batch, values in self._of.items() if batch < first}

    def gather(self, batch: int) -> None:
        """Start to sum `batch`, which all stages have backwarded, over the stages; all of them at one place."""
        self._put_away()
        own = self._of.pop(batch, {})
        self._finish()
        self._summed = {name: own.get(name, zeros).clone() for name, zeros in self._names.items()}
        works = [dist.all_reduce(values, group=self._stages, async_op=True) for values in self._summed.values()]
        self._works = [work for work in works if work is not None]

    def summed(self, reduce: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of `reduce`, Megatron's sum over ranks: what was gathered, summed over the ranks of this stage."""
        given = inspect.signature(reduce).bind(*args, **kwargs)
        given.apply_defaults()
        self._put_away()
        self._finish()
        tracked = _tracked()
        names = given.arguments.get("track_names", given.arguments.get("metric_names")) or sorted(tracked)
        self._names = {name: torch.zeros_like(tracked[name]) for name in names}
        for name, zeros in self._names.items():
            tracked[name].copy_(self._summed.get(name, torch.full_like(zeros, torch.nan)))
        with self._pipelines_of_one(given.arguments):
            return reduce(*given.args, **given.kwargs)

    @contextmanager
    def _pipelines_of_one(self, arguments: dict[str, Any]) -> Iterator[None]:
        """Inside, whichever way Megatron asks for the group of a pipeline, it is of this rank alone."""
        if arguments.get("pg_collection") is not None:
            arguments["pg_collection"] = copy.copy(arguments["pg_collection"])
            arguments["pg_collection"].pp = self._alone
        asked = parallel_state.get_pipeline_model_parallel_group
        parallel_state.get_pipeline_model_parallel_group = lambda *_, **__: self._alone
        try:
            yield
        finally:
            parallel_state.get_pipeline_model_parallel_group = asked

    def _put_away(self) -> None:
        if self._present is None:
            return
        for name, values in _tracked().items():
            self._of[self._present][name] = values.clone()
            values.zero_()
        self._present = None

    def _finish(self) -> None:
        if self._works:
            [device] = {values.device for values in self._summed.values()}
            wait_for(self._works, self._stages, "losses of experts", device)
        self._works = []


def forget_model() -> None:
    """Another model may be trained in this process: Megatron's sums have the number of layers of the first."""
    _entries().clear()


def _tracked() -> dict[str, Tensor]:
    """Megatron's sums by name, of each layer, which it adds to, reduces and clears in place."""
    return {name: entry["values"] if isinstance(entry, dict) else entry.values for name, entry in _entries().items()}


def _entries() -> dict[str, Any]:
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        metrics: dict[str, Any] = moe_utils.get_moe_metrics_tracker().metrics
        return metrics
    tracker: dict[str, Any] = moe_utils.get_moe_layer_wise_logging_tracker()
    return tracker
