"""Where ``evenpipe partition`` has its profile from: a model that it traces and times, or a file."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from evenpipe.cli.parser import UsageError
from evenpipe.cli.progress import progress
from evenpipe.cli.verbosity import say
from evenpipe.descriptions import Cluster, DescriptionError, device, equal_nodes
from evenpipe.partition.models import Example, ModelError, build, from_config, from_function
from evenpipe.partition.profile import Profile, ProfileError
from evenpipe.partition.profiling import Profiles, profile
from evenpipe.partition.search.batch_clock import StageLinks
from evenpipe.partition.search.plan import Plan
from evenpipe.partition.timing import Measured, Roofline, RooflineError, TimeSource
from evenpipe.partition.trace import Graph, TraceError, trace, weightless
from evenpipe.stage_code import StageCodeError, compare_stages, too_large, write_stages

__all__ = ["Source"]

_HERE = ("cpu", "cuda")
_DEVICE, _PRECISION = "a100-40gb", "fp32"  # what the paper has
#: Of a measured device's links nothing is known: PCIe 4 ×16, as the paper's server has it, and the clusters' latency.
_UNKNOWN_GBPS, _LATENCY_MS = 25.0, 0.025


@dataclass(frozen=True)
class Source:
    """The model, its times, and the machine that the options name. Its methods raise UsageError, one line."""

    arguments: Namespace

    @cached_property
    def memory_gib(self) -> float:
        """Return what `--memory-gib` says, else what the device leaves to PyTorch."""
        asked: float | None = self.arguments.memory_gib
        if asked is not None:
            return asked
        if self._device_name == "cpu":
            raise UsageError("--memory-gib: how much may a stage hold? With --device cpu it is not known")
        if self._device_name == "cuda":
            self._check_gpu()
            return float(torch.cuda.mem_get_info()[1] / 2**30)
        with _one_line("--device"):
            named = device(self._device_name)
        return named.memory_gib - named.reserve_gib

    @property
    def host_gbps(self) -> float:
        """Return the GB/s of the link between a stage and its host's memory, each way."""
        asked: float | None = self.arguments.host_gbps
        if asked is not None:
            return asked
        named = self._device_name
        with _one_line("--device"):  # of a measured device's link nothing is known: the paper's (§5.1)
            return device(_DEVICE if named in _HERE else named).host_gbps

    @property
    def links(self) -> StageLinks:
        """Between stages: of `--cluster`, else of the device in its node, at `--stage-gbps` if that is given."""
        found, asked = self._links, self.arguments.stage_gbps
        return found if asked is None else found._replace(gbps=asked, node_gbps=asked)

    @cached_property
    def _links(self) -> StageLinks:
        name = self._device_name
        if self._cluster is not None:
            if name not in (*_HERE, self._cluster.device.name):
                raise UsageError(
                    f"--cluster {self.arguments.cluster}: has {self._cluster.device.name}, and times are of {name}: "
                    "give that --device, or leave it out"
                )
            if self.arguments.stages > self._cluster.gpus:
                raise UsageError(
                    f"--cluster {self.arguments.cluster}: has {self._cluster.gpus} GPUs, too few for "
                    f"{self.arguments.stages} stages"
                )
            return StageLinks.of(self._cluster)
        with _one_line("--device"):
            return StageLinks(_UNKNOWN_GBPS if name in _HERE else device(name).peer_gbps, _LATENCY_MS)

    @cached_property
    def _cluster(self) -> Cluster | None:
        name = self.arguments.cluster
        try:
            return None if name is None else equal_nodes(name)
        except DescriptionError as error:
            raise UsageError(f"--cluster {error}") from error

    def profile(self) -> Profile:
        """Return the profile of micro-batches of `--micro-batch-size`; from the file, where one is named."""
        if self._read is not None:
            return self._read
        times = self._times
        with progress("partition", "tracing") as show, _one_line():
            name, graph = self._traced
            return self._told(profile(graph, times, name, lambda done, total: show("profiling", done, total)))

    def write_plan(self, path: Path, profile: Profile, plan: Plan) -> None:
        """Write the plan, and the code of its stages beside it where the model is there, if it is the model's."""
        graph = self._graph_of(plan.origin.micro_batch_size)
        if graph is None:
            plan.write(path)
            return
        try:
            with TemporaryDirectory() as folder:  # code that computes something else is not written
                draft = Path(folder, path.name)
                write_stages(graph, profile, plan, draft)
                reason = self._compare(draft, graph)
            if reason is not None:
                say(f"note: the stages were not compared with the uncut model: {reason}")
            write_stages(graph, profile, plan, path)
        except StageCodeError as error:
            raise UsageError(f"--out {path}: {error}") from error

    def _graph_of(self, micro_batch_size: int) -> Graph | None:
        """Return the graph that the profile for that size is of; None where it is read from a file, without one."""
        if self._read is not None:
            return None
        if not self.arguments.max_batch:
            return self._traced[1]
        with progress("partition", "tracing"), _one_line():
            return self._graph(micro_batch_size)

    def _compare(self, plan: Path, graph: Graph) -> str | None:
        """Hold the stages beside `plan` against the model, with values, on a micro-batch; why not, if it is too large.

        Raises StageCodeError where they differ.
        """
        if (reason := too_large(graph)) is not None:
            return reason
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            example = self._example(graph.micro_batch_size, nullcontext())
            compare_stages(plan, example.model, example.inputs)
        return None

    @cached_property
    def _traced(self) -> tuple[str, Graph]:
        """The model's name, and its graph for micro-batches of `--micro-batch-size`."""
        example = self._example(self.arguments.micro_batch_size or 1)
        return example.name, trace(example.model, example.inputs)

    def at(self, micro_batch_size: int) -> Profile:
        """Return the profile of micro-batches of another size."""
        return self._told(self._profiles.at(micro_batch_size))

    def _told(self, found: Profile) -> Profile:
        """With what the model was made with, so that it can be made again."""
        asked = self.arguments
        made = {"small": True} if asked.model is not None and asked.small else {}
        if asked.module is None:
            made |= {"sequence_length": asked.sequence_length}
        return found.model_copy(update={"origin": found.origin.model_copy(update=made)})

    @cached_property
    def _profiles(self) -> Profiles:
        if self._read is not None:
            raise UsageError("--max-batch: a profile is of one micro-batch size: name the model in place of --profile")
        times = self._times
        if not isinstance(times, Roofline):
            raise UsageError(
                f"--max-batch: not with --device {self._device_name}: name a device of those with a roofline"
            )
        if self.arguments.module is not None:
            raise UsageError(
                "--max-batch: not with --module, whose inputs have one size: find it with --micro-batch-size"
            )
        with progress("partition", "tracing") as show, _one_line():
            name = self._example(1).name
            return Profiles(self._graph, times, name, lambda done, total: show("profiling", done, total))

    def _graph(self, micro_batch_size: int) -> Graph:
        example = self._example(micro_batch_size)
        return trace(example.model, example.inputs)

    def _example(self, micro_batch_size: int, made: AbstractContextManager[object] | None = None) -> Example:
        """Made inside `made`, weightless if that is None."""
        asked = self.arguments
        options = {
            "precision": asked.precision or _PRECISION,
            "sequence_length": asked.sequence_length,
        }
        option = next((f"--{name}" for name in ("module", "hf") if getattr(asked, name) is not None), "")
        with _one_line(option), weightless() if made is None else made:
            if asked.module is not None:
                return from_function(asked.module, asked.micro_batch_size)
            if asked.hf is not None:
                return from_config(asked.hf, micro_batch_size, attention=asked.attention, **options)
            if asked.model is not None:
                attention = asked.attention or "eager"
                return build(asked.model, micro_batch_size, small=asked.small, attention=attention, **options)
        raise UsageError("a model: name one of --model, --module, --hf, --megatron or --profile")

    @cached_property
    def _times(self) -> TimeSource:
        name = self._device_name
        if name == "cuda":
            self._check_gpu()
        with _one_line("--device"):
            return Measured(torch.device(name)) if name in _HERE else Roofline(device(name))

    @staticmethod
    def _check_gpu() -> None:
        if not torch.cuda.is_available():
            raise UsageError("--device cuda: no GPU is here: name a device, whose times are computed")

    @property
    def _device_name(self) -> str:
        if self._read is not None:
            return self._read.origin.device
        of_cluster = None if self._cluster is None else self._cluster.device.name
        return self.arguments.device or of_cluster or _DEVICE

    @cached_property
    def _read(self) -> Profile | None:
        path: Path | None = self.arguments.profile
        if path is None:
            return None
        with _one_line("--profile"):
            read = Profile.read(path)
        asked, origin = self.arguments, read.origin
        model = asked.model or asked.module or (asked.hf and str(asked.hf))
        for option, wanted, found in (
            ("--model", model, origin.model),
            ("--micro-batch-size", asked.micro_batch_size, origin.micro_batch_size),
            ("--device", asked.device, origin.device),
            ("--precision", asked.precision, origin.precision),
        ):
            if wanted is not None and wanted != found:
                raise UsageError(
                    f"--profile {path}: is of {found}, not of {option} {wanted}: make one, or leave that out"
                )
        return read


@contextmanager
def _one_line(option: str = "") -> Iterator[None]:
    """Raise UsageError, one line that begins with the option whose value is wrong."""
    try:
        yield
    except (ModelError, TraceError, DescriptionError, RooflineError, ProfileError) as error:
        raise UsageError(f"{option} {error}".lstrip()) from error
