"""Say what a run cannot be: sizes that do not divide, and what a device, a model or the framework lacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from evenpipe.descriptions import Cluster, Device, Model, Precision
from evenpipe.planner.run import EstimateError, Recompute, Run

__all__ = ["check", "check_precision"]


def check(run: Run, model: Model, cluster: Cluster) -> None:
    """Raises EstimateError where model and run do not go together, or do not fill the cluster."""
    for line in _wrong(run, model, cluster):
        raise EstimateError(line)


def check_precision(run: Run, device: Device) -> None:
    """Raises EstimateError for a precision that the device, or the run's attention, does not compute in."""
    for line in _wrong_precision(run, device):
        raise EstimateError(line)


def _wrong(run: Run, model: Model, cluster: Cluster) -> Iterator[str]:
    """Each line only where those before it do not hold."""
    yield from _too_small(run)
    if run.recompute not in get_args(Recompute):
        yield f"recompute={run.recompute}: choose one of {', '.join(get_args(Recompute))}"
    for kind in cluster.kinds:
        yield from _wrong_precision(run, kind.device)
    if run.optimizer == "muon" and run.precision == "fp16":
        yield "optimizer=muon: goes with bf16 or fp32, not fp16, in Megatron: choose bf16"
    yield from _wrong_offload(run)
    yield from _unfilled(run, cluster)
    heads, count = ("heads", model.heads) if model.latent else ("key_value_heads", model.key_value_heads)
    yield from _undivided("tensor_parallel", run.tensor, count, f"{model.name}'s {heads}")
    yield from _undivided("tensor_parallel", run.tensor, model.ffn, f"{model.name}'s ffn")
    if cluster.gpus_per_node % run.tensor and run.tensor % cluster.gpus_per_node:
        yield f"tensor_parallel={run.tensor}: does not divide a node's {cluster.gpus_per_node} GPUs: take a divisor"
    for kind in cluster.groups:
        if kind.gpus % (run.tensor * run.context):
            yield (
                f"tensor_parallel={run.tensor}: × context {run.context}, all on one kind of node, is no "
                f"divisor of the {kind.gpus} GPUs on {kind.name}: divide less, or list the nodes otherwise"
            )
    yield from _undivided("context_parallel", run.context, model.sequence, f"{model.name}'s sequence")
    yield from _wrong_experts(run, model)
    each = run.micro_batch * run.data
    if run.global_batch % each:
        yield (
            f"global_batch_size={run.global_batch}: is no multiple of {each} (micro-batch size {run.micro_batch} "
            f"× data parallel {run.data}): {max(1, round(run.global_batch / each)) * each} is"
        )
    yield from _wrong_layout(run, model)


def _too_small(run: Run) -> Iterator[str]:
    sizes = {
        "tensor_parallel": run.tensor,
        "stages": run.stages,
        "data_parallel": run.data,
        "context_parallel": run.context,
        "expert_parallel": run.expert,
        "chunks": run.chunks,
        "micro_batch_size": run.micro_batch,
        "group_size": run.group_size,
        "global_batch_size": run.global_batch,  # may have been derived from those before it
    }
    yield from (f"{option}={size}: must be at least 1" for option, size in sizes.items() if size < 1)


def _wrong_experts(run: Run, model: Model) -> Iterator[str]:
    if model.experts is None:
        if run.expert > 1:
            yield f"expert_parallel={run.expert}: {model.name} has no experts: leave it out"
        return
    if run.lora_rank and {"linear_fc1", "linear_fc2"} & set(run.lora_modules):
        yield "lora_modules: adapters of experts are not described: name linear_qkv, linear_proj"
    yield from _undivided("expert_parallel", run.expert, model.experts.count, f"{model.name}'s experts")
    among = run.replicas * run.tensor // run.expert_ways
    yield from _undivided("expert_parallel", run.expert, among, "data × context parallel ranks")
    if run.placement == "pipeline" and run.stages > 1 and run.expert_replicas != run.data:
        yield "placement=pipeline: Megatron places replicas first where they share out experts: leave it out"


def _wrong_offload(run: Run) -> Iterator[str]:
    if not 0 <= run.optimizer_offload <= 1:
        yield f"optimizer_offload_fraction={run.optimizer_offload:g}: give a share from 0 to 1"
    if not 0 <= run.offload_fraction <= 1:
        yield f"activation_offload_fraction={run.offload_fraction:g}: give a share from 0 to 1"
    if run.offload_delta_bytes < 0:
        yield f"delta_offload_bytes_across_pp_ranks={run.offload_delta_bytes}: give 0 or more bytes"
    if "attn_proj" in run.offload_modules and "core_attn" not in run.offload_modules:
        yield "offload_modules: attn_proj's input is what core_attn gives: name core_attn too"
    for name in ("sharding", "offload_modules"):
        if getattr(run, name) and (run.bpipe or run.spec.name not in ("1f1b", "interleaved")):
            named = "BPipe" if run.bpipe else run.spec.name
            yield f"{name}: goes with Megatron's own schedules only, not {named}: choose one of both"


def _wrong_precision(run: Run, device: Device) -> Iterator[str]:
    if run.precision not in device.tflops:
        computes = ", ".join(one for one in device.tflops if one in get_args(Precision))
        yield f"precision={run.precision}: {device.name} computes {computes}: choose of these"
    if run.precision == "fp32" and run.attention == "flash":
        yield "attention=flash: computes fp16 and bf16, not fp32: choose unfused, or a precision"
    if run.quantization is None:
        for name in ("quantized_parameters", "quantized_attention"):
            if getattr(run, name):
                yield f"{name}: nothing is quantized: say how, with quantized"
        return
    if run.rate not in device.tflops:
        yield f"products in {run.quantized}: {device.name} has no {run.rate}: compute in bf16"
    if run.quantized == "mxfp8" and "fp4" not in device.tflops:  # what scales blocks of 32 has 4 bits too
        yield f"products in mxfp8: {device.name} has no MXFP8: choose tensorwise or delayed"
    if run.precision == "fp32":
        yield f"products in {run.quantized}: go with bf16 or fp16, not fp32: choose bf16"
    if run.quantized_parameters and run.quantization.gathered_bytes is None:
        yield f"fp8_param_gather: weights are not kept in {run.quantized}: leave it out"


def _unfilled(run: Run, cluster: Cluster) -> Iterator[str]:
    short = run.gpus - cluster.gpus
    if short:
        used = f"data_parallel={run.data}: with tensor {run.tensor} × context {run.context} × stages {run.stages}"
        few = f"has {short} too few: name a larger one" if short > 0 else "has more: use all, or name a smaller one"
        yield f"{used} that are {run.gpus} GPUs; {cluster.name} of {cluster.gpus} {few}"


def _undivided(option: str, value: int, whole: int, of: str) -> Iterator[str]:
    if whole % value:
        below = max(n for n in range(1, min(value, whole) + 1) if whole % n == 0)
        yield f"{option}={value}: does not divide {of} ({whole}): {below} does"


def _wrong_layout(run: Run, model: Model) -> Iterator[str]:
    if run.further_part is not None and not model.mtp_layers:
        yield f"layout: {model.name} predicts no further tokens: leave out m"
    parts = run.stages * run.chunks
    if run.layout is not None:
        if len(run.layout) != parts or sum(run.layout) != model.layers or min(run.layout) < 0:
            said = ",".join(map(str, run.layout))
            yield f"layout={said}: give {parts} numbers that add up to {model.layers} layers"
    elif model.layers < parts:
        yield f"stages={run.stages}: {model.name} has {model.layers} layers: use no more parts"
    elif model.layers % parts:
        yield (
            f"stages={run.stages}: {model.layers} layers do not divide by {parts} parts (stages × chunks): "
            "choose a divisor, or give a layout: how many layers each has"
        )
