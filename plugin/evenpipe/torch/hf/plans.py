"""A plan for each shape of batch: made on the first rank, the same parameters on each stage in all of them."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.descriptions import device as data_sheet
from evenpipe.partition.dawnpiper.capuchin import Optimize
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.dawnpiper.problem import PartitionError, Problem
from evenpipe.partition.models import ModelError, made_in
from evenpipe.partition.profile import Profile
from evenpipe.partition.profiling import profile
from evenpipe.partition.search.batch_clock import StageLinks
from evenpipe.partition.search.finding import find_plan
from evenpipe.partition.search.plan import Plan, plan_of
from evenpipe.partition.timing import Roofline
from evenpipe.partition.trace import Graph, TraceError, tensors_of, trace, weightless
from evenpipe.runtime.precisions import autocasting, precision_name
from evenpipe.schedule import ScheduleError
from evenpipe.stage_code import write_stages

__all__ = ["COUNT", "Cutting", "Plans", "adopt"]

#: The argument by which models divide the sum over their tokens.
COUNT: Final = "num_items_in_batch"


@dataclass(frozen=True)
class Cutting:
    """What a model is cut for. `device`: whose data sheet the times of its operations are from."""

    workload: Workload
    limit_bytes: int
    optimize: Optimize = "none"
    device: str = "a100-80gb"
    autocast: torch.dtype | None = None


class _Made(NamedTuple):
    """The message to all ranks: the files of a plan by name, and whether the model reads `COUNT`; or what is wrong."""

    files: dict[str, bytes]
    counts: bool
    wrong: str | None = None


class Plans:
    """The plans of one model, in a folder of this process; all ranks ask for them alike.

    model: it may be on the meta device. device: of its stages, as many as `stages`.
    """

    def __init__(self, model: nn.Module, cutting: Cutting, device: torch.device, folder: Path, stages: int) -> None:
        self._model, self._cutting, self._device = model, cutting, device
        self._folder, self._stages = folder, stages
        self._first: tuple[Profile, Plan] | None = None
        self._number = 0

    def make(self, inputs: Mapping[str, Any], counted: bool) -> tuple[Path, bool]:
        """Return the plan for micro-batches like `inputs`, and whether the model divides its loss by `COUNT`.

        counted: the model may take that. Raises ModelError, one line, on all ranks.
        """
        path = self._folder / f"plan{self._number}.json"
        self._number += 1
        made: list[_Made | None] = [None]
        cause: Exception | None = None
        if dist.get_rank() == 0:
            try:
                with torch.random.fork_rng(devices=[]):
                    made = [self._written(inputs, counted, path)]
            except (TraceError, ScheduleError, ValueError, OSError) as error:
                made = [_Made({}, False, str(error))]
            except Exception as error:  # the other ranks wait for whatever it is
                cause, line = error, f"{type(self._model).__name__}: cannot be traced: {type(error).__name__}: {error}"
                made = [_Made({}, False, line.partition("\n")[0])]
        dist.broadcast_object_list(made, src=0)
        [found] = made
        assert found is not None, "the first rank has sent it"
        if found.wrong is not None:
            raise ModelError(found.wrong) from cause
        for name, content in found.files.items():
            (self._folder / name).write_bytes(content)
        return path, found.counts

    def _written(self, inputs: Mapping[str, Any], counted: bool, path: Path) -> _Made:
        graph = self._traced({**inputs, **({COUNT: torch.tensor(1)} if counted else {})})
        nodes = profile(graph, Roofline(data_sheet(self._cutting.device)), type(self._model).__name__)
        plan = self._cut(nodes)
        write_stages(graph, nodes, plan, path)
        files = {one.name: one.read_bytes() for one in self._folder.glob(f"{path.stem}.*")}
        placeholders = graph.module.graph.find_nodes(op="placeholder")
        return _Made(files, any(node.target == COUNT and node.users for node in placeholders))

    def _traced(self, inputs: Mapping[str, Any]) -> Graph:
        """Trace a copy of the model without weights: this rank has those of its own stage only."""
        made: Any = self._model
        dtype = next((one.dtype for one in made.parameters()), torch.float32)
        config = copy.deepcopy(made.config)
        config.use_cache = False  # keys and values kept for generation would be outputs that no training reads
        initial: Any = importlib.import_module("transformers.initialization")
        with weightless(), initial.no_init_weights(), made_in(precision_name(dtype) or "fp32"), self._device:
            twin: Any = type(made)(config).train()
            twin.tie_weights()  # which is part of what is left out
            for mine, other in zip(made.parameters(), twin.parameters(), strict=True):
                other.requires_grad_(mine.requires_grad)
            given = {name: torch.empty_like(one) if isinstance(one, Tensor) else one for name, one in inputs.items()}
        with autocasting(self._device.type, self._cutting.autocast):
            return trace(twin, given)

    def _cut(self, nodes: Profile) -> Plan:
        cutting, stages = self._cutting, self._stages
        if self._first is None:
            links = StageLinks(data_sheet(cutting.device).peer_gbps)
            plan = find_plan(nodes, cutting.workload, stages, cutting.limit_bytes, cutting.optimize, links=links)
            self._first = nodes, plan
            return plan
        before, plan = self._first
        wanted = [_parameters(before, bounds) for bounds in pairwise([0, *(cut + 1 for cut in plan.cuts), _END])]
        problem = Problem.of(nodes, cutting.workload, stages, cutting.limit_bytes, cutting.optimize, 0.0)
        starts = problem.costs.starts.tolist()
        bounds = [0]
        for position, cut in enumerate(plan.cuts):
            name, low = before.nodes[cut].name, bounds[-1]
            fitting = [
                at
                for at in range(low + 1, problem.costs.last)
                if _parameters(nodes, (starts[low], starts[at])) == wanted[position]
            ]
            same = [at for at in fitting if nodes.nodes[starts[at] - 1].name == name]
            least = sorted(fitting, key=lambda at: nodes.nodes[starts[at] - 1].cut_bytes)
            bounds += (same or least)[:1]
        bounds.append(problem.costs.last)
        if len(bounds) != stages + 1 or _parameters(nodes, (starts[bounds[-2]], _END)) != wanted[-1]:
            raise PartitionError(
                "this batch's operations cannot be cut with the parameters of the stages where they are: "
                "give all batches one length (a collator that pads to max_length)"
            )
        return plan_of(problem, bounds, problem.fits_of(bounds), cutting.workload)


_END: Final = 1 << 60


def _parameters(nodes: Profile, bounds: tuple[int, int]) -> frozenset[str]:
    """Return the parameters that are used by nodes from the first bound on, up to the second."""
    start, stop = bounds
    return frozenset(one.name for one in nodes.parameters if any(start <= user < stop for user in one.users))


def adopt(model: nn.Module, parts: Any) -> None:
    """Give the model the parts' tensors, under all of their names, so that later plans' parts share them."""
    for part in parts:
        for name, tensor in tensors_of(part).items():
            path, _, leaf = name.rpartition(".")
            try:
                module = model.get_submodule(path)
            except AttributeError:  # a constant of the code
                continue
            for table in (module._parameters, module._buffers):
                if leaf in table:
                    table[leaf] = tensor  # type: ignore[assignment]
