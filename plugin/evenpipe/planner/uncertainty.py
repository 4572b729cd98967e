"""How far an iteration may be from its estimate: by how far published ones are that no fit has seen."""

from __future__ import annotations

from typing import Final, NamedTuple

from evenpipe.descriptions import Cluster, Framework, Model
from evenpipe.planner.run import Run

__all__ = ["BEYOND", "EQUAL", "EXPERTS", "TUNED", "WITHIN", "Uncertainty", "uncertainty_of"]


class Uncertainty(NamedTuple):
    """An iteration takes from 1 + ``low`` to 1 + ``high`` times as long as estimated; None where that is unknown.

    meaning: what the interval was measured on, or which kind of run has no published iteration.
    """

    low: float | None
    high: float | None
    meaning: str

    def __str__(self) -> str:
        return "error unknown" if self.low is None or self.high is None else f"{self.low:+.1%} to {self.high:+.1%}"

    def has(self, longer: float) -> bool:
        """Return whether an iteration that takes 1 + ``longer`` times the estimate is within."""
        return self.low is not None and self.high is not None and self.low <= longer <= self.high


#: Times of two runs up to so far apart are equal: a published iteration repeats to that.
EQUAL: Final = 1.02
#: All of 37 published iterations, each estimated by constants that were fitted without it or any other of its source:
#: BPipe's Table 7 by fits to the other model's ordinary rows (13 of 134B, 16 of 96B, BPipe's own among them), and
#: Korthikanti's Table 5 by the fit to Table 7. The largest is off by 4.3 % (`benchmarks/planner_truth.py`).
WITHIN: Final = Uncertainty(
    -0.045, 0.045, "37 published iterations on A100s are within it, each estimated without a fit to its own source"
)
#: The widest interval that is made without one of three sources, to which no constant was fitted: vTrain's 109
#: iterations, Megatron-LM's tests (4) and production runs (5). `benchmarks/published/coverage.py` makes each interval
#: of the other sources and of ``WITHIN``. The source that is left out has 99, 4 and 5 iterations within it. Of vTrain's
#: ten others six took 43 to 102 % longer than estimated: three of its 39B model with t = 2 and small micro-batches,
#: three of 3.6B with the largest and the smallest.
BEYOND: Final = Uncertainty(
    -0.06,
    0.43,
    "108 of 118 published iterations on A100 and H100, to which no constant was fitted, lie within the interval that "
    "the other two of their three sources give; this is the widest of the three",
)
#: Of NVIDIA's published iterations of 2025 and 2026, each estimated by constants that were fitted without its model
#: (`benchmarks/planner_truth.py`), all 26 dense ones are within it, 21 of them in 8 and 4 bits.
TUNED: Final = Uncertainty(
    -0.10,
    0.15,
    "26 published iterations of tuned recipes on H100, B200 and GB200 are within it, each estimated by constants that "
    "were fitted without its model",
)
#: The same of 18 of the 20 with experts. The two others took 15.2 and 15.3 % less time than estimated.
EXPERTS: Final = Uncertainty(
    -0.15,
    0.15,
    "18 of 20 published iterations of tuned recipes with experts on H100, B200 and GB200 are within it, each estimated "
    "by constants that were fitted without its model; routing is taken to be even",
)
#: Devices with a published iteration among these sources.
_MEASURED_DEVICES: Final = ("a100-80gb", "h100", "b200", "gb200")
_HOPPER: Final = "h100"
_BLACKWELL: Final = ("b200", "gb200")
_TUNED_DEVICES: Final = (_HOPPER, *_BLACKWELL)
#: Of the tuned runs: hidden sizes of dense models and of those with experts, tokens of a sample, GB/s of a GPU to other
#: nodes, the most GPUs, and the framework (`benchmarks/published/recipes.yaml`).
_TUNED_HIDDEN: Final = (8192, 18432)
_EXPERTS_HIDDEN: Final = (2048, 7168)
_TUNED_SEQUENCE: Final = (4096, 8192)
_TUNED_NODE_GBPS: Final = 50.0
_TUNED_GPUS: Final = 1024
_TUNED_FRAMEWORK: Final = "megatron"
_DEVICE: Final = "a100-80gb"
_FRAMEWORK: Final = "megatron-v3"
_SCHEDULES: Final = ("1f1b", "interleaved")
_NODE_GBPS: Final = 12.5  # the slowest of theirs (BPipe §4.1)
_GPUS: Final = 512
_DATA: Final = 2
_MICRO_BATCH: Final = 4  # larger ones ran with an allocator under pressure
_HIDDEN: Final = (6144, 25600)
_SEQUENCE: Final = 2048


def uncertainty_of(model: Model, cluster: Cluster, of: Framework, run: Run) -> Uncertainty:
    """Return ``WITHIN`` for runs like those of the tables that were fitted, ``BEYOND`` for others of their kind.

    Runs with experts, in 8 or 4 bits, or on Blackwell are like NVIDIA's of 2025 and 2026, as are large dense ones in
    bf16 on H100.

    A run of a kind without any published iteration among the sources has an unknown error: None, and the kind.
    """
    if kind := _without_source(model, cluster, run):
        return Uncertainty(None, None, f"no published iteration {kind} is among the planner's sources")
    if model.experts is not None:
        return EXPERTS
    dense = cluster.device.name == _HOPPER and run.gpus <= _TUNED_GPUS and of.name == _TUNED_FRAMEWORK
    dense = dense and run.precision == "bf16" and run.attention == "flash"
    if _of_recipes_alone(cluster, run) or (dense and not _beyond_recipes(model, cluster)):
        return TUNED
    linked = cluster.nodes == 1 or cluster.node_gbps >= _NODE_GBPS
    alike = linked and cluster.device.name == _DEVICE and of.name == _FRAMEWORK
    sized = run.gpus <= _GPUS and run.data <= _DATA and run.micro_batch <= _MICRO_BATCH
    way = run.precision == "fp16" and run.attention == "unfused" and run.recompute != "none"
    sequence = model.sequence == _SEQUENCE and _HIDDEN[0] <= model.hidden <= _HIDDEN[1]
    return WITHIN if alike and sized and way and sequence else BEYOND


def _of_recipes_alone(cluster: Cluster, run: Run) -> bool:
    """Return whether NVIDIA's recipes are the only source of such a run, experts left out."""
    return run.quantized is not None or cluster.device.name in _BLACKWELL


def _beyond_recipes(model: Model, cluster: Cluster) -> str:
    """Return the first size of a run that no tuned recipe has; empty where all are within theirs."""
    low, high = _TUNED_HIDDEN if model.experts is None else _EXPERTS_HIDDEN
    kinds = {
        f"over {cluster.node_gbps:g} GB/s a GPU between nodes": cluster.nodes > 1
        and cluster.node_gbps < _TUNED_NODE_GBPS,
        f"with a hidden size of {model.hidden:,}": not low <= model.hidden <= high,
        f"of {model.sequence:,} tokens": not _TUNED_SEQUENCE[0] <= model.sequence <= _TUNED_SEQUENCE[1],
    }
    return next((kind for kind, lacking in kinds.items() if lacking), "")


def _without_source(model: Model, cluster: Cluster, run: Run) -> str:
    """Return the first of the run's kinds that no source has; empty where all have one."""
    device, experts = cluster.device.name, model.experts is not None
    large, alone = run.gpus > _TUNED_GPUS, experts or _of_recipes_alone(cluster, run)
    what = "with experts" if experts else f"in {run.quantized}" if run.quantized else f"on {device}"
    kinds = {
        "on unlike nodes": bool(cluster.groups) or cluster.slowness > 1,
        f"on {device}": device not in _MEASURED_DEVICES,
        f"in {run.precision}": run.precision == "fp32",
        f"in {run.quantized}": run.quantized == "blockwise",
        f"with experts on more than {_TUNED_GPUS:,} GPUs": experts and large,
        f"in {run.quantized} on more than {_TUNED_GPUS:,} GPUs": run.quantized is not None and large,
        f"on more than {_TUNED_GPUS:,} {device}": device in _BLACKWELL and large,
        f"with experts on {device}": experts and device not in _TUNED_DEVICES,
        "with latent attention and no experts": model.latent is not None and not experts,
        "with further predicted tokens and no experts": model.mtp_layers > 0 and not experts,
        "of an encoder": not model.causal,
        f"under {run.spec.name}": run.spec.name not in _SCHEDULES,
        f"with {run.optimizer}": run.optimizer != "adam",
        "with an optimizer on the host": run.optimizer_offload > 0,
        "with LoRA": run.lora_rank > 0,
        "with uneven routing": run.routing_imbalance > 1,
        "with fully sharded replicas": run.sharding is not None,
        "with activations on the host": bool(run.offload_modules),
        f"{what} {(beyond := _beyond_recipes(model, cluster))}": alone and bool(beyond),
        f"with context parallelism on {device}": run.context > 1 and device not in _TUNED_DEVICES,
    }
    return next((kind for kind, lacking in kinds.items() if lacking), "")
