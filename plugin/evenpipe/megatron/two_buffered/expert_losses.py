"""The auxiliary losses of experts under 2BW: of each batch apart, and summed over the stages in the background."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

__all__ = ["ExpertLosses"]


class ExpertLosses:
    """What Megatron's routers add up for the log, of a batch at a time.

    Megatron has one sum, which it adds up over all stages in every iteration, and clears. Under 2BW, stages forward the
    first micro-batches of the next batch by then, and a sum over them would join all stages. So each batch has its own
    here. The sum over stages is started where the stages exchange the figures of the batch (`gather`), and the log has
    it an iteration later, as it has the gradient norm. In the first iteration that is 0.
    """

    def __init__(self) -> None:
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._of: dict[int, dict[str, Tensor]] = {}  # by batch and name: a number for each layer of the whole model
        self._present: int | None = None
        self._names: dict[str, Tensor] = {}  # in one order on all ranks, once Megatron has told; zeros
        self._summed: dict[str, Tensor] = {}
        self._works: list[dist.Work] = []

    def use(self, batch: int) -> None:
        """What is computed from now on is of `batch`."""
        if batch == self._present:
            return
        self._put_away()
        self._present = batch
        kept = self._of.setdefault(batch, {})
        for name, entry in _tracked().items():
            entry.values = kept.setdefault(name, torch.zeros_like(entry.values))

    def drop(self, first: int) -> None:
        """What has been computed of `first` and later batches will be computed again."""
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
        self._names = {name: torch.zeros_like(tracked[name].values) for name in names}
        for name, zeros in self._names.items():
            tracked[name].values = self._summed.get(name, zeros).clone()
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
        kept = self._of.setdefault(self._present, {})
        for name, entry in _tracked().items():
            kept[name] = entry.values
            entry.values = torch.zeros_like(entry.values)
        self._present = None

    def _finish(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


class _Entry:
    """One of Megatron's sums up to 0.17, which are dicts; later ones have the attribute."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self._entry = entry

    @property
    def values(self) -> Tensor:
        found: Tensor = self._entry["values"]
        return found

    @values.setter
    def values(self, values: Tensor) -> None:
        self._entry["values"] = values


def _tracked() -> Mapping[str, Any]:
    """Megatron's sums by name, each with the numbers of all layers as `values`."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        metrics: Mapping[str, Any] = moe_utils.get_moe_metrics_tracker().metrics
        return metrics
    return {name: _Entry(entry) for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()}
