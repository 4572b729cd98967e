"""What a search is asked: a model, a cluster, the most samples of an iteration, and what is fixed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from evenpipe.planner.descriptions import Cluster, Framework, Model
from evenpipe.planner.errors import EstimateError
from evenpipe.planner.estimate import framework_of
from evenpipe.planner.run import Run
from evenpipe.planner.search.engine import Engine
from evenpipe.schedule import Spec, find, offered

__all__ = ["Question", "divisors"]

#: Of a context-parallel rank, where no number of them was asked for: it is for sequences that are long.
_LEAST_TOKENS: Final = 8192


@dataclass(frozen=True)
class Question:
    """``samples``: the maximum safe global batch (PipeDream-2BW §4). ``asked``: what is fixed of every run.

    schedules: those that are weighed; with ``bpipe`` false none of them with BPipe. delayed: a plan may step with
    gradients that are a batch late, as 2BW does; what it trains is not what a flush trains. tensor, stages,
    micro_batch, context: t, p, b and c, where they are not to be chosen.
    """

    model: Model
    cluster: Cluster
    samples: int
    engine: Engine
    schedules: tuple[str, ...]
    framework: Framework | None = None
    asked: Run = field(default_factory=lambda: Run(global_batch=1))
    bpipe: bool = True
    delayed: bool = False
    tensor: int | None = None
    stages: int | None = None
    micro_batch: int | None = None
    context: int | None = None

    def refused(self, spec: Spec) -> str:
        """Why a plan may not have the schedule; empty where it may."""
        lacking = self.engine.lacks(spec)
        if lacking:
            return f"{self.engine.called} does not run it ({lacking})"
        if "stream" in spec.needs and not self.delayed:
            return "gradients are a batch late, which --delayed allows"
        return ""

    @cached_property
    def of(self) -> Framework:
        return self.framework or framework_of(self.model, self.cluster)

    def base(self, tensor: int) -> Run:
        """A run with the framework's defaults filled in, which depend on tensor parallelism."""
        return replace(self.asked, tensor=tensor).of(self.of)

    def check(self) -> None:
        """Raises EstimateError for what no run on this cluster can compute in, and where no schedule is left."""
        precision, device = self.base(1).precision, self.cluster.device
        if precision not in device.tflops:
            computes = ", ".join(device.tflops)
            raise EstimateError(f"precision={precision}: {device.name} computes {computes}: choose of these")
        if precision == "fp32" and self.base(1).attention == "flash":
            raise EstimateError("attention=flash: computes fp16 and bf16, not fp32: choose unfused, or a precision")
        reasons = [self.refused(find(name)) for name in self.schedules]
        if all(reasons):
            able = ", ".join(offered(self.engine.offers))
            raise EstimateError(f"schedules={','.join(self.schedules)}: {reasons[0]}: choose of {able}")

    @cached_property
    def tensors(self) -> list[int]:
        """t that divides heads and a node (BPipe §4.2), and the inner size of the MLP."""
        model, gpus = self.model, self.cluster.gpus_per_node
        heads = model.heads if model.latent else model.key_value_heads
        found = [t for t in divisors(gpus) if heads % t == 0 and model.ffn % t == 0]
        return self._chosen("tensor_parallel", self.tensor, found, "divides heads, ffn and a node's GPUs")

    def contexts(self, tensor: int) -> list[int]:
        """c beside t: up to a number of tokens a rank, or what was asked for."""
        most = max(1, self.model.sequence // _LEAST_TOKENS)
        wanted = [c for c in self._contexts if self.context == c or (self.context is None and c <= most)]
        return [c for c in wanted if self.cluster.gpus % (tensor * c) == 0]

    @cached_property
    def _contexts(self) -> list[int]:
        """c that divides the GPUs, and the sequence into pairs of parts, by which Megatron balances a causal mask."""
        found = [
            c
            for c in divisors(self.cluster.gpus)
            if c == 1 or (self.engine.context and self.model.sequence % (2 * c) == 0)
        ]
        return self._chosen("context_parallel", self.context, found, f"{self.of.name} divides sequence and GPUs by")

    def depths(self, tensor: int, context: int = 1) -> list[int]:
        """p of which t × c × p divides all GPUs, with a layer for every stage."""
        found = [p for p in divisors(self.cluster.gpus // (tensor * context)) if p <= self.model.layers]
        return [p for p in found if self.stages in (None, p)]

    def divisions(self, tensor: int) -> list[tuple[int, int]]:
        """(c, p) beside t."""
        return [(c, p) for c in self.contexts(tensor) for p in self.depths(tensor, c)]

    def micro_batches(self, samples: int) -> list[int]:
        """b that divides a replica's samples."""
        return [b for b in divisors(samples) if self.micro_batch in (None, b)]

    @staticmethod
    def _chosen(option: str, chosen: int | None, found: list[int], what: str) -> list[int]:
        if chosen is None:
            return found
        if chosen not in found:
            raise EstimateError(f"{option}={chosen}: none of what {what}: choose of {', '.join(map(str, found))}")
        return [chosen]

    def experts(self, replicas: int) -> list[int]:
        """Expert parallelism that divides experts and replicas, data-parallel and context-parallel ones."""
        if self.model.experts is None:
            return [1]
        return [e for e in divisors(self.model.experts.count) if replicas % e == 0]


def divisors(n: int) -> list[int]:
    """In ascending order."""
    small = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})
