"""A training run that is planned: how model and batch are divided, and what the framework does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from evenpipe.planner.descriptions import Cluster, Framework, Model, Precision
from evenpipe.planner.errors import EstimateError

__all__ = ["Attention", "Recompute", "Run"]

Recompute = Literal["none", "selective", "full"]
Attention = Literal["unfused", "flash"]


@dataclass(frozen=True)
class Run:
    """Sizes as in the papers: t, p, d, v, b and B are ``tensor``, ``stages``, ``data``, ``chunks``, ``micro_batch`` and
    ``global_batch``; ``context`` and ``expert`` divide the sequence and the experts, the latter among data-parallel and
    context-parallel ranks. What is None is the framework's, and ``of`` fills it in.

    recompute: nothing, the core of attention ("selective"), or whole layers. layout: layers of each part of the
    pipeline (stage, or model chunk in the order of the model); even, if left out. synchronous_transfers: evictions
    are waited for. message_ms: what a message between neighbours takes, where that has been measured.
    """

    global_batch: int
    tensor: int = 1
    stages: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    chunks: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"
    schedule: str = "1f1b"
    bpipe: bool = False
    group_size: int = 1
    layout: tuple[int, ...] | None = None
    synchronous_transfers: bool = False
    precision: Precision | None = None
    attention: Attention | None = None
    sequence_parallel: bool | None = None
    sharded_optimizer: bool | None = None
    gradients_in_fp32: bool | None = None
    overlap_collectives: bool | None = None
    overlap_gradients: bool | None = None
    overlap_parameters: bool | None = None
    hand_over_us: float | None = None
    blocking: tuple[str, ...] | None = None
    divided_messages: bool | None = None
    message_ms: float | None = None

    def of(self, framework: Framework) -> Run:
        """The same with ``framework``'s defaults, where nothing is said."""
        defaults = framework.model_dump(exclude={"name", "sources"})
        own = {key: getattr(self, key) for key in self.__dataclass_fields__}
        filled = {key: value if value is not None else defaults.get(key) for key, value in own.items()}
        filled["sequence_parallel"] = bool(filled["sequence_parallel"]) and self.tensor > 1
        if filled["precision"] == "fp32":
            filled["gradients_in_fp32"] = True
        return Run(**filled)

    @property
    def gpus(self) -> int:
        return self.tensor * self.context * self.stages * self.data

    @property
    def micro_batches(self) -> int:
        """Of a replica, in an iteration."""
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def element_bytes(self) -> int:
        """Of a parameter or an activation that is computed with."""
        return 4 if self.precision == "fp32" else 2

    def check(self, model: Model, cluster: Cluster) -> None:
        """Raises EstimateError where model and run do not go together, or do not fill the cluster."""
        sizes = ("global_batch", "tensor", "stages", "data", "context", "expert", "chunks", "micro_batch", "group_size")
        for key in sizes:
            if getattr(self, key) < 1:
                raise EstimateError(f"{key}={getattr(self, key)}: must be at least 1")
        if self.recompute not in get_args(Recompute):
            raise EstimateError(f"recompute={self.recompute}: choose one of {', '.join(get_args(Recompute))}")
        self._fits(cluster)
        if self.precision not in cluster.device.tflops:
            found = ", ".join(cluster.device.tflops)
            raise EstimateError(f"precision={self.precision}: {cluster.device.name} computes {found}: choose one of them")
        heads = model.heads if model.latent else model.key_value_heads
        self._divides("tensor", self.tensor, heads, f"{model.name}'s {'heads' if model.latent else 'key_value_heads'}")
        self._divides("tensor", self.tensor, model.ffn, f"{model.name}'s ffn")
        if cluster.gpus_per_node % self.tensor and self.tensor % cluster.gpus_per_node:
            raise EstimateError(f"tensor={self.tensor}: does not divide a node's {cluster.gpus_per_node} GPUs")
        self._divides("context", self.context, model.sequence, f"{model.name}'s sequence")
        if self.expert > 1 and model.experts is None:
            raise EstimateError(f"expert={self.expert}: {model.name} has no experts: leave it out")
        if model.experts is not None:
            self._divides("expert", self.expert, model.experts.count, f"{model.name}'s experts")
            self._divides("expert", self.expert, self.data * self.context, "data × context parallel ranks")
        each = self.micro_batch * self.data
        self._divides("micro_batch × data", each, self.global_batch, "the global batch")
        self._layout(model)

    def _fits(self, cluster: Cluster) -> None:
        if self.gpus == cluster.gpus:
            return
        used = f"tensor {self.tensor} × context {self.context} × stages {self.stages} × data {self.data}"
        if self.gpus < cluster.gpus:
            raise EstimateError(f"{used} = {self.gpus} GPUs: {cluster.name} has {cluster.gpus}: use all, or name a smaller")
        lacking = self.gpus - cluster.gpus
        raise EstimateError(
            f"{used} = {self.gpus} GPUs: {cluster.name} has {cluster.gpus}, {lacking} too few: use a larger cluster or "
            "less of these"
        )

    @staticmethod
    def _divides(name: str, value: int, whole: int, of: str) -> None:
        if whole % value:
            below = max(n for n in range(1, min(value, whole) + 1) if whole % n == 0)
            raise EstimateError(f"{name}={value}: does not divide {of} ({whole}): {below} does")

    def _layout(self, model: Model) -> None:
        parts = self.stages * self.chunks
        if self.layout is None:
            if model.layers < parts:
                raise EstimateError(f"stages={self.stages}: {model.name} has {model.layers} layers: use no more parts")
            if model.layers % parts:
                raise EstimateError(
                    f"stages={self.stages}: {model.layers} layers do not divide by {parts} parts (stages × chunks): "
                    "choose a divisor, or say with layout how many layers each has"
                )
            return
        if len(self.layout) != parts or sum(self.layout) != model.layers or min(self.layout) < 0:
            said = ",".join(map(str, self.layout))
            raise EstimateError(f"layout={said}: give {parts} numbers that add up to {model.layers} layers")

    def layers_of(self, model: Model) -> Sequence[int]:
        """Layers of each part of the pipeline, in the order of the model."""
        parts = self.stages * self.chunks
        return self.layout if self.layout is not None else (model.layers // parts,) * parts
