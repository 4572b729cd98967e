"""A training run that is planned: how model and batch are divided, and what the framework does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, Final, Literal, get_args

from evenpipe.descriptions import Cluster, Device, Framework, Model, Precision, Rate
from evenpipe.planner.quantized import QUANTIZATIONS, Quantization, Quantized
from evenpipe.schedule import DelayCorrection, Queues, ScheduleError, Spec, choose

__all__ = [
    "ITERATIONS_WITH_LATE_GRADIENTS",
    "Adapted",
    "Attention",
    "Dispatcher",
    "EstimateError",
    "Graph",
    "Module",
    "OffloadModule",
    "Optimizer",
    "Placement",
    "Recompute",
    "Run",
    "Sharding",
]


class EstimateError(ValueError):
    """The run cannot be: its sizes do not divide, or the cluster or the framework has not what it asks for."""


Recompute = Literal["none", "selective", "full"]
Attention = Literal["unfused", "flash"]
Placement = Literal["replicas", "pipeline"]
#: What selective recomputation carries out again (``--recompute-modules``).
Module = Literal["core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "moe", "shared_experts"]
#: What is in CUDA graphs (``--cuda-graph-scope``).
Graph = Literal["full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess"]
Dispatcher = Literal["alltoall", "deepep", "hybridep"]
Optimizer = Literal["adam", "sgd", "muon"]
#: Whose inputs fine-grained offloading takes to the host (``--offload-modules``).
OffloadModule = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
#: What low-rank adapters are beside, as Megatron Bridge's ``target_modules`` name it.
Adapted = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
#: What fully sharded replicas divide among themselves (``--data-parallel-sharding-strategy``): ZeRO-0, 1, 2 and 3.
Sharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
#: Iterations of 2BW for the loss that one iteration with a flush reaches. PipeDream-2BW §5.1, GPT on Wikitext-103: test
#: perplexities "match exactly when Vanilla is run for 20% fewer iterations"; `benchmarks/convergence.py` has 20, 27.
ITERATIONS_WITH_LATE_GRADIENTS: Final = 1 / 0.8


@dataclass(frozen=True)
class Run:
    """Sizes as in the papers: t, p, d, v, b and B are ``tensor``, ``stages``, ``data``, ``chunks``, ``micro_batch`` and
    ``global_batch``; ``context`` and ``expert`` divide the sequence and the experts, the latter among data-parallel and
    context-parallel ranks. What is None is the framework's, and ``of`` fills it in.

    expandable_segments: the allocator's option of that name. recompute: nothing, the core of attention ("selective"),
    or whole layers. layout: layers of each part of the pipeline (stage, or model chunk in the order of the model);
    even, if left out. synchronous_transfers: evictions are waited for. message_ms: what a message between neighbours
    takes, where that has been measured. placement: what is next to each other after tensor and context ranks: the
    replicas of a stage, as Megatron has it (PipeDream-2BW §3.3), or a pipeline's stages (``--use-tp-pp-dp-mapping``;
    BPipe §3.5 puts pipelines before replicas).
    quantized: how operands of linear layers' products are, in fewer bits than ``precision`` has; not, if left out.
    quantized_parameters: weights are kept and gathered that way, beside fp32 ones (``--fp8-param-gather``).
    quantized_attention: fused attention computes in FP8. user_buffers: ``--tp-comm-overlap``.
    recomputed_modules: under "selective". dispatcher: how tokens reach their experts; overlap_experts: beside another
    micro-batch's compute (``--overlap-moe-expert-parallel-comm``); fused_experts: all local experts' products in one
    kernel, with activation and casts. graphs: what the host starts as a whole. moment_bytes: of each of Adam's two.
    expert_tensor: ranks that an expert's matrices are divided among; ``tensor``, if left out. recomputed_layers: under
    "full", so many of each part's layers are carried out again, and the others keep all; all are, if left out.
    further_part: the part of the pipeline that predicts further tokens; the last, if left out. fused_softmax: unfused
    attention has Megatron's fused softmax, where the shape allows.
    optimizer: "muon" for matrices, beside Adam for all else; ``sharded_optimizer`` shares out its matrices whole, as
    Megatron's layer-wise distributed optimizer does. optimizer_offload: the share of parameters that the host steps,
    which has their fp32 weights and moments (``--optimizer-cpu-offload``, DeepSpeed's ``offload_optimizer``).
    sharding: of replicas under FSDP (``--use-megatron-fsdp``); not FSDP, if left out. offload_modules: whose inputs
    wait on the host for their backward; offload_fraction: of their groups; offload_delta_bytes: that each later stage
    keeps more than the one before (``--delta-offload-bytes-across-pp-ranks``).
    delay_correction: of 2bw's late gradients (``--evenpipe-delay-correction``).
    lora_rank: of adapters beside ``lora_modules``, which alone are trained (LoRA, Hu et al. 2021); 0: no adapters.
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
    one_queue: bool | None = None
    expandable_segments: bool | None = None
    message_ms: float | None = None
    placement: Placement = "replicas"
    quantized: Quantized | None = None
    quantized_parameters: bool = False
    quantized_attention: bool = False
    user_buffers: bool = False
    recomputed_modules: tuple[Module, ...] = ("core_attn",)
    dispatcher: Dispatcher = "alltoall"
    overlap_experts: bool = False
    fused_experts: bool = False
    graphs: tuple[Graph, ...] = ()
    moment_bytes: float = 4
    expert_tensor: int | None = None
    recomputed_layers: int | None = None
    further_part: int | None = None
    fused_softmax: bool = True
    optimizer: Optimizer = "adam"
    optimizer_offload: float = 0.0
    sharding: Sharding | None = None
    offload_modules: tuple[OffloadModule, ...] = ()
    offload_fraction: float = 1.0
    offload_delta_bytes: int = 0
    lora_rank: int = 0
    lora_modules: tuple[Adapted, ...] = get_args(Adapted)
    delay_correction: DelayCorrection = "none"

    def of(self, framework: Framework) -> Run:
        """Return the same with ``framework``'s defaults, where nothing is said."""
        unsaid = {key for key in Framework.model_fields if getattr(self, key, 0) is None}
        filled = replace(self, **framework.model_dump(include=unsaid))
        # Without a flush the newest weights are not those that the next forward runs on: nothing is gathered beside it.
        gathers = filled.overlap_parameters and not (self.delayed and "overlap_parameters" in unsaid)
        # Muon's first releases reduce and gather beside nothing (`validate_args` of Megatron-LM 0.16).
        still = self.optimizer == "muon"
        gathers = gathers and not (still and "overlap_parameters" in unsaid)
        reduces = filled.overlap_gradients and not (still and "overlap_gradients" in unsaid)
        # Flash attention computes half precision only.
        attention = "unfused" if filled.precision == "fp32" and "attention" in unsaid else filled.attention
        return replace(
            filled,
            attention=attention,
            sharded_optimizer=filled.sharded_optimizer if self.sharding is None else self.sharding != "no_shard",
            overlap_gradients=reduces,
            overlap_parameters=gathers,
            sequence_parallel=bool(filled.sequence_parallel) and self.tensor > 1,
            gradients_in_fp32=filled.gradients_in_fp32 or filled.precision == "fp32",
        )

    def but(self, **changes: Any) -> Run:
        """Return `dataclasses.replace` of it, in a tenth of the time: a search makes a hundred thousand."""
        other = object.__new__(Run)
        other.__dict__.update(self.__dict__, **changes)
        return other

    @property
    def spec(self) -> Spec:
        """The schedule that is built: interleaved 1F1B, where 1F1B is asked for with model chunks.

        Where experts' messages are hidden, with its order for that. Raises ScheduleError for one that there is not.
        """
        named = choose(self.schedule)
        found = choose(named.chunked) if self.chunks > 1 and named.chunked else named
        return found.fused_form or found if self.overlap_experts and self.stages > 1 else found

    @property
    def delayed(self) -> bool:
        """Return whether the pipeline steps without a flush."""
        try:
            return "stream" in self.spec.needs
        except ScheduleError:  # which is found out when it is built
            return False

    @property
    def queues(self) -> Queues:
        """Return what a recipe of this run exports of CUDA's queues, by which its programs are built."""
        return "one" if self.one_queue and self.tensor * self.context > 1 else "many"

    @property
    def iterations(self) -> float:
        """Return how many iterations reach the loss that a run without late gradients reaches in one.

        Nothing is known of paci's, where each stage steps by itself: they count as 1, and no plan has it.
        """
        return ITERATIONS_WITH_LATE_GRADIENTS if self.delayed and "in_place" not in self.spec.needs else 1.0

    @property
    def can_be_levelled(self) -> bool:
        """Return whether BPipe is off, and would level the stages."""
        return not self.bpipe and self.stages >= 4 and self.spec.balanced is not None

    @property
    def gpus(self) -> int:
        return self.tensor * self.context * self.stages * self.data

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches of a replica in an iteration."""
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def shards_gradients(self) -> bool:
        """Return whether gradients are reduced after every micro-batch, each rank keeping its part."""
        return self.sharding in ("optim_grads", "optim_grads_params")

    @property
    def shards_parameters(self) -> bool:
        """Return whether weights are gathered for every forward and backward."""
        return self.sharding == "optim_grads_params"

    @property
    def expert_ways(self) -> int:
        """Ranks among which an expert's matrices are divided."""
        return self.expert_tensor or self.tensor

    @property
    def replicas(self) -> int:
        """Ranks that have the same parameters, experts left out."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Ranks that have the same experts."""
        return self.replicas * self.tensor // (self.expert * self.expert_ways)

    @property
    def together(self) -> int:
        """Ranks that exchange something in every layer, which are next to each other."""
        return lcm(self.tensor * self.context, self.expert_ways * self.expert)

    @property
    def element_bytes(self) -> int:
        """Return the bytes of a parameter or an activation that takes part in compute."""
        return 4 if self.precision == "fp32" else 2

    @property
    def recomputing(self) -> str:
        """Return what is carried out again, in a word; modules by name, where they are not Megatron's default."""
        by_name = self.recompute == "selective" and self.recomputed_modules != Run.recomputed_modules
        return "+".join(self.recomputed_modules) if by_name else self.recompute

    @property
    def again(self) -> frozenset[Module]:
        """Return the modules that selective recomputation carries out again."""
        if self.recompute != "selective":
            return frozenset()
        inner: tuple[Module, ...] = ("moe_act", "shared_experts") if "moe" in self.recomputed_modules else ()
        return frozenset((*self.recomputed_modules, *inner))

    @property
    def quantization(self) -> Quantization | None:
        return None if self.quantized is None else QUANTIZATIONS[self.quantized]

    @property
    def rate(self) -> Rate:
        """Return what most products compute in."""
        assert self.precision is not None
        return self.precision if self.quantization is None else self.quantization.rate

    def operand_bytes(self, quantized: bool) -> float:
        """Return the bytes of an element that a product takes."""
        return self.quantization.element_bytes if quantized and self.quantization else self.element_bytes

    def check(self, model: Model, cluster: Cluster) -> None:
        """Raises EstimateError where model and run do not go together, or do not fill the cluster."""
        sizes = {
            "global_batch_size": self.global_batch,
            "tensor_parallel": self.tensor,
            "stages": self.stages,
            "data_parallel": self.data,
            "context_parallel": self.context,
            "expert_parallel": self.expert,
            "chunks": self.chunks,
            "micro_batch_size": self.micro_batch,
            "group_size": self.group_size,
        }
        for option, size in sizes.items():
            if size < 1:
                raise EstimateError(f"{option}={size}: must be at least 1")
        if self.recompute not in get_args(Recompute):
            raise EstimateError(f"recompute={self.recompute}: choose one of {', '.join(get_args(Recompute))}")
        for kind in cluster.kinds:
            self.check_precision(kind.device)
        if self.optimizer == "muon" and self.precision == "fp16":
            raise EstimateError("optimizer=muon: goes with bf16 or fp32, not fp16, in Megatron: choose bf16")
        if not 0 <= self.optimizer_offload <= 1:
            raise EstimateError(f"optimizer_offload_fraction={self.optimizer_offload:g}: give a share from 0 to 1")
        self._check_offload()
        self._fills(cluster)
        heads = ("heads", model.heads) if model.latent else ("key_value_heads", model.key_value_heads)
        self._divides("tensor_parallel", self.tensor, heads[1], f"{model.name}'s {heads[0]}")
        self._divides("tensor_parallel", self.tensor, model.ffn, f"{model.name}'s ffn")
        if cluster.gpus_per_node % self.tensor and self.tensor % cluster.gpus_per_node:
            raise EstimateError(
                f"tensor_parallel={self.tensor}: does not divide a node's {cluster.gpus_per_node} GPUs: take a divisor"
            )
        for kind in cluster.groups:
            if kind.gpus % (self.tensor * self.context):
                raise EstimateError(
                    f"tensor_parallel={self.tensor}: × context {self.context}, all on one kind of node, is no "
                    f"divisor of the {kind.gpus} GPUs on {kind.name}: divide less, or list the nodes otherwise"
                )
        self._divides("context_parallel", self.context, model.sequence, f"{model.name}'s sequence")
        if self.expert > 1 and model.experts is None:
            raise EstimateError(f"expert_parallel={self.expert}: {model.name} has no experts: leave it out")
        if self.lora_rank and model.experts is not None and {"linear_fc1", "linear_fc2"} & set(self.lora_modules):
            raise EstimateError("lora_modules: adapters of experts are not described: name linear_qkv, linear_proj")
        if model.experts is not None:
            self._divides("expert_parallel", self.expert, model.experts.count, f"{model.name}'s experts")
            among = self.replicas * self.tensor // self.expert_ways
            self._divides("expert_parallel", self.expert, among, "data × context parallel ranks")
            if self.placement == "pipeline" and self.stages > 1 and self.expert_replicas != self.data:
                raise EstimateError(
                    "placement=pipeline: Megatron places replicas first where they share out experts: leave it out"
                )
        each = self.micro_batch * self.data
        if self.global_batch % each:
            raise EstimateError(
                f"global_batch_size={self.global_batch}: is no multiple of {each} (micro-batch size {self.micro_batch} "
                f"× data parallel {self.data}): {max(1, round(self.global_batch / each)) * each} is"
            )
        self._layout(model)

    def _check_offload(self) -> None:
        if not 0 <= self.offload_fraction <= 1:
            raise EstimateError(f"activation_offload_fraction={self.offload_fraction:g}: give a share from 0 to 1")
        if self.offload_delta_bytes < 0:
            raise EstimateError(f"delta_offload_bytes_across_pp_ranks={self.offload_delta_bytes}: give 0 or more bytes")
        if "attn_proj" in self.offload_modules and "core_attn" not in self.offload_modules:
            raise EstimateError("offload_modules: attn_proj's input is what core_attn gives: name core_attn too")
        for name in ("sharding", "offload_modules"):
            if getattr(self, name) and (self.bpipe or self.spec.name not in ("1f1b", "interleaved")):
                named = "BPipe" if self.bpipe else self.spec.name
                raise EstimateError(f"{name}: goes with Megatron's own schedules only, not {named}: choose one of both")

    def check_precision(self, device: Device) -> None:
        """Raises EstimateError for a precision that the device, or the run's attention, does not compute in."""
        if self.precision not in device.tflops:
            computes = ", ".join(one for one in device.tflops if one in get_args(Precision))
            raise EstimateError(f"precision={self.precision}: {device.name} computes {computes}: choose of these")
        if self.precision == "fp32" and self.attention == "flash":
            raise EstimateError("attention=flash: computes fp16 and bf16, not fp32: choose unfused, or a precision")
        if self.quantization is None:
            for name in ("quantized_parameters", "quantized_attention"):
                if getattr(self, name):
                    raise EstimateError(f"{name}: nothing is quantized: say how, with quantized")
            return
        if self.rate not in device.tflops:
            raise EstimateError(f"products in {self.quantized}: {device.name} has no {self.rate}: compute in bf16")
        if self.quantized == "mxfp8" and "fp4" not in device.tflops:  # what scales blocks of 32 has 4 bits too
            raise EstimateError(f"products in mxfp8: {device.name} has no MXFP8: choose tensorwise or delayed")
        if self.precision == "fp32":
            raise EstimateError(f"products in {self.quantized}: go with bf16 or fp16, not fp32: choose bf16")
        if self.quantized_parameters and self.quantization.gathered_bytes is None:
            raise EstimateError(f"fp8_param_gather: weights are not kept in {self.quantized}: leave it out")

    def _fills(self, cluster: Cluster) -> None:
        if self.gpus == cluster.gpus:
            return
        used = f"data_parallel={self.data}: with tensor {self.tensor} × context {self.context} × stages {self.stages}"
        short = self.gpus - cluster.gpus
        remedy = f"has {short} too few: name a larger one" if short > 0 else "has more: use all, or name a smaller one"
        raise EstimateError(f"{used} that are {self.gpus} GPUs; {cluster.name} of {cluster.gpus} {remedy}")

    @staticmethod
    def _divides(option: str, value: int, whole: int, of: str) -> None:
        if whole % value:
            below = max(n for n in range(1, min(value, whole) + 1) if whole % n == 0)
            raise EstimateError(f"{option}={value}: does not divide {of} ({whole}): {below} does")

    def _layout(self, model: Model) -> None:
        if self.further_part is not None and not model.mtp_layers:
            raise EstimateError(f"layout: {model.name} predicts no further tokens: leave out m")
        parts = self.stages * self.chunks
        if self.layout is None:
            if model.layers < parts:
                raise EstimateError(f"stages={self.stages}: {model.name} has {model.layers} layers: use no more parts")
            if model.layers % parts:
                raise EstimateError(
                    f"stages={self.stages}: {model.layers} layers do not divide by {parts} parts (stages × chunks): "
                    "choose a divisor, or give a layout: how many layers each has"
                )
        elif len(self.layout) != parts or sum(self.layout) != model.layers or min(self.layout) < 0:
            said = ",".join(map(str, self.layout))
            raise EstimateError(f"layout={said}: give {parts} numbers that add up to {model.layers} layers")

    def layers_of(self, model: Model) -> Sequence[int]:
        """Layers of each part of the pipeline, in the order of the model."""
        parts = self.stages * self.chunks
        return self.layout if self.layout is not None else (model.layers // parts,) * parts
