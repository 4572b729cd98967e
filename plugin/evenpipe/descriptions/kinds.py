"""Models, devices, clusters and frameworks: frozen, typed, without unknown keys, with the source of every constant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

__all__ = [
    "Cluster",
    "Described",
    "DescriptionError",
    "Device",
    "Experts",
    "Framework",
    "Latent",
    "Model",
    "NodeGroup",
    "Precision",
    "Rate",
    "Values",
]


class DescriptionError(ValueError):
    """There is no such description, or it does not say what it must; the message is one line with the remedy."""


_ALL = "all"


class Values(BaseModel):
    """A part of a description."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Described(Values):
    """A whole description. ``sources``: by key, where its value is from; ``all`` stands for every key without one."""

    name: str = Field(min_length=1)
    sources: Mapping[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _sources_are_of_keys(self) -> Self:
        for key in self.sources:
            if key not in (_ALL, *type(self).model_fields):
                raise ValueError(f"sources.{key}: is no key of it: correct its name")
        return self


Precision = Literal["fp32", "fp16", "bf16"]
#: What a device computes in: a run's precision, or that of products whose operands have fewer bits.
Rate = Literal["fp32", "fp16", "bf16", "fp8", "fp4"]
_Teraflops = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(gt=0, le=1)]


class Device(Described):
    """A GPU: what it can do, by its maker, and how much of its memory PyTorch is left with.

    tflops: 10^12 operations/s by precision, dense. matmul: share of them that the fastest matrix product has been
    measured to reach; an A100's, if left out; narrow_matmul: the same of products in 8 and 4 bits. transposing: these
    want both operands with the summed dimension last. elementwise: share of ``memory_gbps`` that element-wise kernels
    reach. memory_gib: what ``torch.cuda.mem_get_info`` has as total. reserve_gib: CUDA's context, libraries and NCCL's
    communicators. memory_gbps, host_gbps: 10^9 bytes/s to its own memory and, one way, to the host's. peer_gbps: to
    other GPUs of its node, one way; peer_links: to how many, each over a link of its own, if they are a mesh.
    launch_us: a kernel, at least; host_us: what a process takes to start one, 13.6, if left out. attention: share of
    ``tflops`` that fused attention reaches forward and backward. framework: the oldest that is run on it, where that is
    newer than what a model was trained with.
    """

    tflops: Mapping[Rate, _Teraflops] = Field(min_length=1)
    matmul: _Share = 0.869
    narrow_matmul: Mapping[Rate, _Share] = Field(default_factory=dict)
    transposing: bool = False
    elementwise: _Share = 0.8
    multiprocessors: int = Field(ge=1)
    memory_gib: float = Field(gt=0)
    reserve_gib: float = Field(ge=0)
    memory_gbps: float = Field(gt=0)
    peer_gbps: float = Field(gt=0)
    peer_links: int = Field(default=0, ge=0)
    host_gbps: float = Field(gt=0)
    launch_us: float = Field(ge=0)
    host_us: float = Field(default=13.6, ge=0)
    attention: tuple[_Share, _Share] = Field(strict=False)
    framework: str | None = None

    def slowed(self, times: float) -> Device:
        """Return the same that takes ``times`` as long for everything that it computes or starts."""
        return self.model_copy(
            update={
                "tflops": {precision: rate / times for precision, rate in self.tflops.items()},
                "memory_gbps": self.memory_gbps / times,
                "launch_us": self.launch_us * times,
                "host_us": self.host_us * times,
            }
        )


class NodeGroup(Described):
    """``count`` equal nodes in the list of a cluster's: what is left out is the cluster's own.

    slowness: times that these nodes take as long as their device's description says.
    """

    count: int = Field(ge=1)
    device: str
    slowness: float = Field(default=1.0, ge=1)
    peer_gbps: float | None = Field(default=None, gt=0)
    node_gbps: float = Field(gt=0)
    latency_us: float = Field(ge=0)
    node_latency_us: float = Field(ge=0)


class Cluster(Described):
    """``nodes`` of ``gpus_per_node`` GPUs.

    peer_gbps: 10^9 bytes/s of a GPU to others in its node, one way; the device's own, if left out. node_gbps: of a GPU
    to other nodes, one way: its share of what leaves the node. latency_us: of a message or a step of a collective
    between GPUs of a node, node_latency_us: between nodes. slowness: times that everything takes as long as the
    device's description says. groups: the unlike nodes that it has, in the order of ranks; then ``device`` is the one
    with the most memory, and node_gbps and node_latency_us are those between groups.
    """

    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    device: Device
    peer_gbps: float = Field(gt=0)
    node_gbps: float = Field(gt=0)
    latency_us: float = Field(ge=0)
    node_latency_us: float = Field(ge=0)
    slowness: float = Field(default=1.0, ge=1)
    groups: tuple[Cluster, ...] = ()

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def kinds(self) -> tuple[Cluster, ...]:
        """Return its groups of equal nodes; itself, where all are equal."""
        return self.groups or (self,)

    def of_size(self, nodes: int, gpus_per_node: int) -> Cluster:
        """So many of its nodes with so many GPUs each, among which what leaves a node is shared.

        Raises DescriptionError for unlike nodes.
        """
        if self.groups:
            raise DescriptionError(f"{self.name}: lists unlike nodes, and has no other size: change the list")
        share = self.node_gbps
        if gpus_per_node != self.gpus_per_node:
            share = min(share * self.gpus_per_node / gpus_per_node, max(share, self.device.host_gbps))
        return self.model_copy(update={"nodes": nodes, "gpus_per_node": gpus_per_node, "node_gbps": share})


class Framework(Described):
    """Defaults of a training framework; a run's own flags come before them.

    attention: ``unfused`` keeps all scores, with a fused softmax where the shape allows; ``flash`` keeps none.
    gradients_in_fp32: gradients are accumulated in 4 bytes. sharded_optimizer: ZeRO-1. sequence_parallel: where there
    is tensor parallelism. overlap_collectives: those of column-parallel layers run beside the backward's matrix
    products. overlap_gradients, overlap_parameters: the reduction of gradients and the gathering of parameters run
    beside compute. hand_over_us: what a stage waits for the host in a hand-over to a neighbour. blocking: schedules
    in which a stage computes nothing during a hand-over; in others, messages travel beside compute. divided_messages:
    each tensor-parallel rank sends its part of a hand-over, also without sequence parallelism. one_queue: it demands
    CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor or context parallelism. expandable_segments: of PyTorch's allocator.
    """

    precision: Precision
    attention: Literal["unfused", "flash"]
    gradients_in_fp32: bool
    sharded_optimizer: bool
    sequence_parallel: bool
    overlap_collectives: bool
    overlap_gradients: bool
    overlap_parameters: bool
    hand_over_us: float = Field(ge=0)
    blocking: tuple[str, ...] = Field(strict=False)
    divided_messages: bool
    one_queue: bool = False
    expandable_segments: bool = False


class Experts(Values):
    """A mixture of experts in place of the MLP.

    ``count`` experts with an inner size of ``ffn``, of which each token takes ``chosen``, and ``shared_ffn`` of experts
    that all tokens take. ``groups``: of experts, of which a token's are in ``chosen_groups`` at most. The first
    ``dense_layers`` layers have the model's own MLP, and of the others all but every ``step``-th; where these are
    others, ``layers`` says of each layer whether it has experts.
    """

    count: int = Field(ge=2)
    chosen: int = Field(ge=1)
    ffn: int = Field(ge=1)
    shared_ffn: int = Field(default=0, ge=0)
    groups: int = Field(default=1, ge=1)
    chosen_groups: int = Field(default=1, ge=1)
    dense_layers: int = Field(default=0, ge=0)
    step: int = Field(default=1, ge=1)
    layers: tuple[bool, ...] = Field(default=(), strict=False)


class Latent(Values):
    """Multi-head latent attention (DeepSeek-V2 §2.1): ranks of what queries, and keys and values, are made from.

    query_rank: 0 where queries are made from the hidden state itself (Moonlight, DeepSeek-V2-Lite).

    A head's query and key have ``plain_dim`` + ``rotary_dim`` elements, its value ``value_dim``.
    """

    query_rank: int = Field(default=0, ge=0)
    key_value_rank: int = Field(ge=1)
    plain_dim: int = Field(ge=1)
    rotary_dim: int = Field(ge=1)
    value_dim: int = Field(ge=1)


class Model(Described):
    """A Transformer of equal layers between an embedding and a head.

    key_value_heads: of grouped-query attention; as many as heads, if left out. head_dim: hidden / heads, if left out.
    ffn: inner size of the MLP, 4 × hidden, if left out; gated: two projections in, as SwiGLU. biases: of all linear
    layers. dropout: of embedding, attention and residuals. max_positions: rows of learned positions; ``sequence``, if
    left out. causal: each token sees those before it; without it, the head is BERT's. tied: head and embedding are one
    matrix. qk_norm: queries and keys have a norm each. window: tokens that attention sees in every second layer, all in
    the others. chunk: tokens of the parts of a sequence that attention stays within, but in every fourth layer (Llama
    4). mtp_layers: extra layers that predict further tokens (DeepSeek-V3 §2.2). framework: what it was trained
    with, as published. left_out: what the model has beside this, in words, which every estimate repeats.
    """

    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    key_value_heads: int = Field(default=0, ge=0)
    head_dim: int = Field(default=0, ge=0)
    ffn: int = Field(default=0, ge=0)
    gated: bool = False
    norm: Literal["layer", "rms"] = "layer"
    biases: bool = True
    dropout: bool = True
    positions: Literal["learned", "rotary"] = "learned"
    max_positions: int = Field(default=0, ge=0)
    vocabulary: int = Field(ge=1)
    sequence: int = Field(ge=1)
    causal: bool = True
    tied: bool = True
    experts: Experts | None = None
    latent: Latent | None = None
    qk_norm: bool = False
    window: int = Field(default=0, ge=0)
    chunk: int = Field(default=0, ge=0)
    mtp_layers: int = Field(default=0, ge=0)
    framework: str = "megatron"
    left_out: tuple[str, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _fill_in(self) -> Self:
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(
                f"hidden={self.hidden} does not divide by heads={self.heads}: correct one, or add head_dim"
            )
        defaults = {
            "key_value_heads": self.heads,
            "head_dim": self.hidden // self.heads,
            "ffn": 4 * self.hidden,
        }
        for key, value in defaults.items():
            if not getattr(self, key):
                object.__setattr__(self, key, value)
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"heads={self.heads}: not divisible by key_value_heads={self.key_value_heads}: correct one"
            )
        if self.experts and self.experts.chosen > self.experts.count:
            raise ValueError(f"experts.chosen={self.experts.chosen}: there are {self.experts.count}: choose fewer")
        if self.experts and self.experts.layers and len(self.experts.layers) != self.layers:
            raise ValueError(f"experts.layers: has {len(self.experts.layers)} entries: give one a layer, {self.layers}")
        return self

    def of_sequence(self, tokens: int) -> Model:
        """Return the same with sequences of so many tokens, and as many learned positions, if it had fewer."""
        positions = max(self.max_positions, tokens) if self.max_positions else 0
        return self.model_copy(update={"sequence": tokens, "max_positions": positions})

    def expert_layers(self, first: int, end: int) -> int:
        """Return how many of the layers from ``first`` to before ``end`` have experts."""
        if self.experts is None:
            return 0
        if self.experts.layers:
            return sum(self.experts.layers[first:end])
        step = self.experts.step
        return max(0, end // step - max(first, self.experts.dense_layers) // step)
