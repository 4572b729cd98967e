"""The question of a search: a model, a cluster, the most samples of an iteration, an engine, and what is fixed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Final, get_args

from evenpipe.descriptions import Cluster, Framework, Model
from evenpipe.planner.divisors import divisors
from evenpipe.planner.estimate import framework_of
from evenpipe.planner.possible import check_precision
from evenpipe.planner.run import EstimateError, Module, Placement, Recompute, Run
from evenpipe.planner.search.profiles import Divided
from evenpipe.planner.stage_nodes import StageNodes
from evenpipe.schedule import NEEDS, Need, Spec, find, offered, own

__all__ = ["Engine", "Question", "nothing_fits", "weighed"]


def weighed() -> tuple[str, ...]:
    """Return the schedules that are weighed where none are named: all of the package's but four.

    To simulate the runs of V-Min or of interleaved ZB takes as long as those of all others together: V-Min's fit where
    others do not, and interleaved ZB's have many model chunks. ZB-H2 and DualPipeV hold more than ZB-H1 and ZB-V, for
    the same bubble where each batch is flushed.
    """
    return tuple(name for name in own() if name not in ("v-min", "interleaved-zb", "zb-h2", "dualpipev"))


@dataclass(frozen=True)
class Engine:
    """``called`` is its name in a line; ``offers``: what schedules may need of it.

    scopes: what it can recompute. placements: in which orders it numbers ranks. uneven: its stages may have different
    numbers of layers. context: it divides the sequence. delayed_sharded: schedules without flushes go together with
    tensor and expert parallelism.
    """

    called: str
    offers: frozenset[Need]
    scopes: tuple[Recompute, ...] = get_args(Recompute)
    placements: tuple[Placement, ...] = get_args(Placement)
    uneven: bool = True
    context: bool = True
    delayed_sharded: bool = True

    def lacks(self, spec: Spec) -> str:
        """Return what it does not offer of what the schedule needs, in words; empty where it runs it."""
        return " and ".join(NEEDS[need] for need in NEEDS if need in spec.needs - self.offers)


#: Context-parallel ranks that are tried of any sequence, as published runs of 4,096 tokens and more have them.
_CONTEXTS: Final = 8
#: Tokens of a context-parallel rank of a long sequence: more than `_CONTEXTS` ranks are tried down to so many.
_LEAST_TOKENS: Final = 8192


@dataclass(frozen=True)
class Question:
    """``samples``: the maximum safe global batch (PipeDream-2BW §4). ``asked``: what is fixed of every run.

    schedules: those that are weighed; with ``bpipe`` false none of them with BPipe. delayed: a plan may step with
    gradients that are a batch late, as 2BW does; what it trains is not what a flush trains. tensor, stages,
    micro_batch, context: t, p, b and c, where they are not to be chosen. further: runs that differ from ``asked`` in
    precision, gradients or dispatcher, which are weighed beside it. divided: costs of the model's blocks on the
    cluster, which several searches share; otherwise a search finds its own.
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
    further: tuple[Run, ...] = ()
    divided: Divided | None = None

    def refused(self, spec: Spec, stages: int = 0) -> str:
        """Return why a plan may not have the schedule, on so many stages if they are known; empty where it may."""
        if "times" in spec.needs:
            return "its order is made when times have been measured"
        lacking = self.engine.lacks(spec)
        if lacking:
            return f"{self.engine.called} does not run it ({lacking})"
        if self.asked.overlap_experts and stages != 1 and not (spec.fused or spec.fused_form):
            return "has no order in which experts' messages are hidden"
        if "in_place" in spec.needs:
            return "how many iterations it needs to a loss is not known"
        if "stream" in spec.needs and not self.delayed:
            return "gradients are a batch late, which --delayed allows"
        return ""

    @cached_property
    def nodes(self) -> StageNodes:
        return StageNodes(self.cluster)

    @cached_property
    def of(self) -> Framework:
        return self.framework or framework_of(self.model, self.cluster)

    def base(self, tensor: int) -> Run:
        """Return a run with the framework's defaults filled in, which depend on tensor parallelism."""
        return self.bases(tensor)[0]

    def bases(self, tensor: int) -> list[Run]:
        """Return the same of each precision, type of gradients and dispatcher."""
        return [replace(one, tensor=tensor).of(self.of) for one in (self.asked, *self.further)]

    def modules(self, base: Run) -> tuple[Module, ...]:
        """Return what "selective" carries out again: what was asked for, or what takes little time.

        Unfused attention has a core that keeps its scores (Korthikanti et al. 2022 §5). Fused attention keeps none;
        there it is norms, experts' activation and the up-projections of latent attention, whose results are large.
        Of FP8 layers norms keep nothing, and delayed scaling recomputes no activation (`transformer_config.py`).
        """
        if base.attention == "unfused" or self.asked.recomputed_modules != Run.recomputed_modules:
            return self.asked.recomputed_modules
        found: list[Module] = [] if base.quantized else ["layernorm"]
        found += ["moe_act"] * (self.model.experts is not None and base.quantized != "delayed")
        found += ["mla_up_proj"] * (self.model.latent is not None)
        return tuple(found) or ("mlp",)

    def check(self) -> None:
        """Raises EstimateError for what no run on this cluster can compute in, and where no schedule is left."""
        for kind, base in product(self.cluster.kinds, self.bases(1)):
            check_precision(base, kind.device)
        reasons = [self.refused(find(name)) for name in self.schedules]
        if all(reasons):
            able = ", ".join(name for name in offered(self.engine.offers) if not self.refused(find(name)))
            raise EstimateError(f"schedule={','.join(self.schedules)}: {reasons[0]}: choose of {able}")

    @cached_property
    def tensors(self) -> list[int]:
        """t that divides heads and a node (BPipe §4.2), and the inner size of the MLP."""
        model, gpus = self.model, self.cluster.gpus_per_node
        heads = model.heads if model.latent else model.key_value_heads
        found = [t for t in divisors(gpus) if heads % t == 0 and model.ffn % t == 0]
        return self._chosen("tensor_parallel", self.tensor, found, "divides heads, ffn and a node's GPUs")

    def contexts(self, tensor: int) -> list[int]:
        """c beside t: up to eight, and more for long sequences; or the one that was asked for."""
        most = max(_CONTEXTS, self.model.sequence // _LEAST_TOKENS)
        wanted = [c for c in self._contexts if self.context == c or (self.context is None and c <= most)]
        return [c for c in wanted if all(kind.gpus % (tensor * c) == 0 for kind in self.cluster.kinds)]

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

    @property
    def scopes(self) -> tuple[Recompute, ...]:
        """Return what may be recomputed: Megatron hides no messages of experts in layers that are recomputed whole."""
        return tuple(one for one in self.engine.scopes if one != "full" or not self.asked.overlap_experts)

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

    def experts(self, replicas: int, tensor: int) -> list[tuple[int, int]]:
        """Ranks among which experts are shared out, and those that an expert's matrices are divided among.

        The latter are as many as divide the other matrices; or one, where experts are shared out among a multiple of
        these. Together they divide all ranks of a stage, of which there are ``tensor`` a replica.
        """
        if self.model.experts is None:
            return [(1, tensor)]
        counts = divisors(self.model.experts.count)
        if self.asked.overlap_experts:  # Megatron hides messages of experts that are shared out only
            counts = [e for e in counts if e > 1]
        found = [(e, ways) for ways in sorted({1, tensor}) for e in counts if replicas * tensor % (e * ways) == 0]
        return [(e, ways) for e, ways in found if ways == tensor or e % tensor == 0]


_GIB: Final = 2**30


def nothing_fits(question: Question, allowed: int, nearest: float) -> str:
    """One line. ``allowed``: how many runs might have been planned; ``nearest``: bytes of the smallest's fullest stage.

    With the option that is wrong at its head, by how much, and what would do.
    """
    model, cluster = question.model.name, question.cluster
    if allowed:
        have, need = cluster.device.memory_gib, nearest / _GIB
        least = f"its smallest run takes {need:.1f} GiB of the fullest GPU, which has {have:.1f}"
        return (
            f"cluster={cluster.name}: is too small for {model}: {least}, {need - have:.1f} too few: take about "
            f"{math.ceil(cluster.nodes * need / have)} such nodes, or GPUs with more memory"
        )
    any_depth = question.engine.uneven or question.stages is not None
    ways = [(t * c, p) for t in question.tensors for c, p in question.divisions(t)]
    replicas = [cluster.gpus // (ranks * p) for ranks, p in ways if any_depth or question.model.layers % p == 0]
    if not replicas:
        return (
            f"stages={question.stages}: {cluster.gpus} GPUs do not divide by so many, or {model} has fewer layers "
            f"({question.model.layers}): choose a smaller divisor"
        )
    if question.samples < min(replicas):
        return (
            f"global_batch_size={question.samples}: nothing reaches it: a run on {cluster.gpus} GPUs has at least "
            f"{min(replicas)} replicas, each with a sample: give at least {min(replicas)}, or a smaller cluster"
        )
    shares = [question.samples // each for each in replicas]
    if not any(question.micro_batches(each) for each in shares if each):
        return (
            f"micro_batch_size={question.micro_batch}: does not divide the samples of any number of replicas: choose a "
            f"divisor of {question.samples}"
        )
    if question.stages is not None and not question.engine.uneven and question.model.layers % question.stages:
        return (
            f"stages={question.stages}: {model}'s {question.model.layers} layers do not divide by so many, and "
            f"{question.of.name} has even stages only: choose a divisor, or another --framework"
        )
    return (
        f"schedule={','.join(question.schedules)}: no size of them divides {model}'s {question.model.layers} layers, "
        f"{question.samples} samples and {cluster.gpus} GPUs: allow others, or give another --global-batch-size"
    )
