"""The answers to a run: the least change that fits, and the fastest runs that fit, by few changes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from evenpipe.fitting.moves import ASPECTS, NARROWER, Aspect, alternatives, changed, with_aspect
from evenpipe.fitting.weighing import Weighing
from evenpipe.planner.possible import check
from evenpipe.planner.run import EstimateError, Module, OffloadModule, Run
from evenpipe.planner.search.question import Engine, Question
from evenpipe.planner.search.search import EQUAL, Planned, preference, search

__all__ = ["Answers", "Asked", "answers", "by_evenpipe"]

_STOCK: Final = ("1f1b", "interleaved")
#: Aspects that say how a checkpoint's tensors are divided.
_SIZES: Final[frozenset[Aspect]] = frozenset(("tensor", "pipeline", "context", "experts"))
#: Aspects of what waits on the host.
_ON_THE_HOST: Final[frozenset[Aspect]] = frozenset(("offload", "host"))
_TOP: Final = 8
#: Less than so much of the time is no step on the way to a faster run.
_STEP: Final = 1.002


def by_evenpipe(run: Run) -> bool:
    """Return whether EvenPipe carries out the run's schedule: under Megatron's own, some hand-overs are waited for."""
    return run.blocking == ()


@dataclass(frozen=True)
class Asked:
    """``run``: as it is, with the framework's defaults filled in. keep: what stays as it is.

    flags: how many flags of the run's command line another run changes. modules: what selective recomputation may carry
    out again. schedules: EvenPipe's that go together with the run, ``bpipe`` whether BPipe does. offloaded: modules
    whose inputs may wait on the host. searches: the model chunks a stage with which an order may be searched. step: is
    called with what is looked for.
    """

    weighing: Weighing
    run: Run
    engine: Engine
    keep: frozenset[Aspect]
    flags: Callable[[Run], int]
    modules: tuple[Module, ...]
    schedules: tuple[str, ...]
    bpipe: bool
    offloaded: tuple[OffloadModule, ...] = ()
    searches: tuple[int, ...] = ()
    step: Callable[[str], None] = lambda _: None

    def few(self, found: Iterable[Planned]) -> Planned | None:
        """Return the run with the fewest changed flags of those that are as fast as the fastest."""
        each = list(found)
        least = min(map(self.cost, each), default=0.0)
        near = [one for one in each if self.cost(one) <= EQUAL * least]
        return min(near, key=lambda one: (self.flags(one.run), self.cost(one)), default=None)

    def cost(self, one: Planned) -> float:
        """Return the milliseconds by which runs are compared: 2 % more where nearly no memory is left free.

        Also 2 % more for each new use of the host, since no published iteration says how far such an estimate is off.
        """
        tight, _ = preference(one.run, one.most_bytes, self.weighing.have)
        used = len(changed(self.run, one.run) & _ON_THE_HOST)
        return _ms(one) * (EQUAL if tight else 1) * EQUAL**used

    def fastest(self, found: Iterable[Planned]) -> Planned | None:
        """Return the run with the least cost."""
        return min(found, key=self.cost, default=None)


class Answers(NamedTuple):
    """``now``: the run as it is. None for an answer that there is not, or that is another one.

    least: the fewest changes that fit, where it does not. sized: the fastest with its tensor, pipeline, context and
    expert parallelism. stock: the fastest with Megatron's schedules; evenpipe: with EvenPipe's, where that is faster.
    narrower: with sums and moments in fewer bits, where that is faster.
    """

    now: Planned
    least: Planned | None
    sized: Planned | None
    stock: Planned | None
    evenpipe: Planned | None
    narrower: Planned | None


def answers(asked: Asked) -> Answers:
    """Return all of them. Raises EstimateError, one line, for a run that cannot be, and where nothing fits."""
    estimate = asked.weighing.planned(asked.run)
    if estimate is None:
        check(asked.run, asked.weighing.model, asked.weighing.cluster)
        raise EstimateError("schedule: no such run can be built: `evenpipe estimate` says why")
    asked.step("its sizes kept")
    alike = sized = _fastest(asked, _STOCK, asked.keep | _SIZES, [])
    own = bool(asked.schedules) and "schedule" not in asked.keep
    if own:
        sized = _worth(alike, _fastest(asked, asked.schedules, asked.keep | _SIZES, [])) or alike
    asked.step("the least change")
    least = None if estimate.estimate.fits else _least(asked, alike)
    asked.step("Megatron's schedules")
    seeds = [one.run for one in _some(alike, least)]
    stock = asked.few(_some(_fastest(asked, _STOCK, asked.keep, seeds), alike, least))
    if stock is None and not {"host", "optimizer"} & asked.keep and asked.run.precision != "fp32":
        stock = _on_host(asked)
    evenpipe = None
    if own:
        asked.step("EvenPipe's schedules")
        seeds = [one.run for one in _some(stock, sized)]
        evenpipe = asked.few(_some(_fastest(asked, asked.schedules, asked.keep, seeds), sized))
        asked.step("an order of its own")
        evenpipe = _worth(evenpipe, _searched(asked, _some(evenpipe, stock))) or evenpipe
    best = asked.fastest(_some(stock, evenpipe))
    narrower = None
    if best is None or not asked.keep >= NARROWER:
        asked.step("fewer bits")
        narrower = _narrower(asked, best)
    if best is None and narrower is None:
        _refuse(asked)
    if least is None and not estimate.estimate.fits:
        least = _pruned(asked, stock or evenpipe or narrower, False)
    evenpipe = _worth(stock, evenpipe)
    narrower = _worth(evenpipe or stock, narrower)
    return Answers(estimate, least, sized, stock, evenpipe, narrower)


def _worth(simple: Planned | None, other: Planned | None) -> Planned | None:
    """Return the other run if it is faster than the simpler one, but for equal times, or the only one."""
    worth = simple is None or other is None or _ms(simple) > EQUAL * _ms(other)
    return other if worth else None


def _ms(one: Planned) -> float:
    return one.estimate.iteration_ms


def _some(*each: Planned | None) -> list[Planned]:
    return [one for one in each if one is not None]


def _moves(asked: Asked, run: Run, keep: frozenset[Aspect]) -> Iterator[tuple[Aspect, Run]]:
    for aspect, one in alternatives(asked.weighing, run, asked.modules, asked.offloaded):
        if not changed(run, one) & keep:
            yield aspect, one


def _least(asked: Asked, sized: Planned | None) -> Planned | None:
    """One change or, if none does, two; where more are needed, as few as are left of a fast run. None in fewer bits."""
    keep = asked.keep | NARROWER
    singles = list(_moves(asked, asked.run, keep))
    if found := asked.few(asked.weighing.near_fastest(one for _, one in singles)):
        return found
    pairs = (two for first, one in singles for second, two in _moves(asked, one, keep) if first != second)
    if found := asked.few(asked.weighing.near_fastest(pairs)):
        return found
    return _pruned(asked, sized, False)


def _fastest(
    asked: Asked, schedules: tuple[str, ...], keep: frozenset[Aspect], seeds: Iterable[Run], narrow: bool = False
) -> Planned | None:
    """Return the fastest run that fits, by a search over all sizes and by steps from runs that are known."""
    run, weighing = asked.run, asked.weighing
    blocking = asked.run.blocking or ("1f1b",)
    own = schedules is not _STOCK
    keep = keep if narrow else keep | NARROWER
    found: list[Run] = []
    with suppress(EstimateError):  # where nothing fits of what is searched
        found = [one.run for one in search(_question(asked, schedules, keep, own), _TOP).plans]
    for aspect in keep:
        found = [_whole(weighing, with_aspect(one, run, aspect, weighing.cluster.gpus)) for one in found]
    if "schedule" not in keep:
        found = [replace(one, blocking=() if own else blocking) for one in found]
    changes = [one for _, one in _moves(asked, run, keep | NARROWER)]
    known = [one for one in (*seeds, *changes) if own or not by_evenpipe(one) or "schedule" in keep]
    each = [_descended(asked, asked.fastest(weighing.near_fastest(runs)), keep) for runs in (found, known)]
    return _pruned(asked, asked.fastest(_some(*each)), True)


def _searched(asked: Asked, found: Iterable[Planned]) -> Planned | None:
    """Return the fastest run by an order that is searched: with the sizes of these, and less recomputation."""
    tried: dict[Run, None] = {}
    for one in found:
        if one.run.stages > 1 and one.run.chunks in asked.searches:
            base = replace(one.run, schedule="searched", bpipe=False, group_size=1, blocking=())
            if one.bubble > EQUAL - 1:
                tried[base] = None
            if one.run.recompute != "none" and "recompute" not in asked.keep:
                plain = Run.recomputed_modules
                tried[replace(base, recompute="none", recomputed_modules=plain, recomputed_layers=None)] = None
    return asked.fastest(_some(*map(asked.weighing.fitting, tried)))


def _descended(asked: Asked, best: Planned | None, keep: frozenset[Aspect]) -> Planned | None:
    """Return what is reached by taking the fastest change again and again."""
    while best is not None:
        moves = (one for _, one in _moves(asked, best.run, keep | {"schedule"}))
        step = asked.fastest(asked.weighing.near_fastest((best.run, *moves))) or best
        if asked.cost(step) * _STEP > asked.cost(best):
            return best
        best = step
    return None


def _pruned(asked: Asked, best: Planned | None, fast: bool) -> Planned | None:
    """Return the run with fewer of its changes, as long as it fits and, if it is to be ``fast``, is as fast."""
    limit = EQUAL * asked.cost(best) if best is not None and fast else float("inf")
    while best is not None:
        aspects = changed(asked.run, best.run)
        gpus = asked.weighing.cluster.gpus
        tried = [_whole(asked.weighing, with_aspect(best.run, asked.run, aspect, gpus)) for aspect in aspects]
        each = [one for one in map(asked.weighing.fitting, tried) if one is not None and asked.cost(one) <= limit]
        fewer = [one for one in each if asked.flags(one.run) < asked.flags(best.run)]
        if not fewer:
            return best
        best = min(fewer, key=lambda one: (asked.flags(one.run), asked.cost(one)))
    return None


def _whole(weighing: Weighing, run: Run) -> Run:
    """Return the run with layers for each of its parts."""
    parts = run.stages * run.chunks
    fits = weighing.model.layers % parts == 0 if run.layout is None else len(run.layout) == parts
    return run if fits else weighing.balanced(run)


def _on_host(asked: Asked) -> Planned | None:
    """Return the fastest run whose optimizer is on the host, for where nothing else fits."""
    if asked.run.optimizer != "adam" or asked.run.moment_bytes < 4:
        return None
    away = replace(asked, run=replace(asked.run, sharded_optimizer=True, optimizer_offload=1.0))
    return _pruned(asked, _fastest(away, _STOCK, asked.keep, []), True)


def _narrower(asked: Asked, best: Planned | None) -> Planned | None:
    """Return the fastest in fewer bits: by steps from the best, or by a search where nothing else fits."""
    if asked.keep >= NARROWER:
        return None
    fields: dict[str, Any] = {"sharded_optimizer": True}
    if "gradients" not in asked.keep and asked.run.precision == "bf16":
        fields["gradients_in_fp32"] = False
    if "moments" not in asked.keep and asked.run.precision != "fp32":
        fields["moment_bytes"] = min(2, asked.run.moment_bytes)
    if best is not None:
        start = asked.weighing.fitting(replace(best.run, **fields))
        return _pruned(asked, _descended(asked, start, asked.keep), True)
    narrow = replace(asked, run=replace(asked.run, **fields))
    found = _fastest(narrow, asked.schedules or _STOCK, asked.keep, [], narrow=True)
    return _pruned(asked, found, True)


#: Fields of a run that a search chooses.
_SEARCHED: Final = (
    *("global_batch", "tensor", "stages", "data", "context", "expert", "expert_tensor", "chunks", "micro_batch"),
    *("recompute", "recomputed_modules", "recomputed_layers", "schedule", "bpipe", "group_size", "layout"),
    *("further_part", "placement"),
)


@dataclass(frozen=True)
class _Whole(Question):
    """A question for all samples of an iteration, no less; ``own``: how experts are shared out, if that is kept."""

    own: tuple[int, int] | None = None

    def divisions(self, tensor: int) -> list[tuple[int, int]]:
        gpus, each = self.cluster.gpus // tensor, super().divisions(tensor)
        return [(c, p) for c, p in each if self.samples % (gpus // (c * p)) == 0]

    def experts(self, replicas: int, tensor: int) -> list[tuple[int, int]]:
        every = super().experts(replicas, tensor)
        return every if self.own is None else [one for one in every if one == self.own]


def _question(asked: Asked, schedules: tuple[str, ...], keep: frozenset[Aspect], own: bool) -> Question:
    run, weighing = asked.run, asked.weighing
    blocking = () if own else run.blocking or ("1f1b",)
    fields: dict[str, Any] = {name: getattr(Run(global_batch=1), name) for name in _SEARCHED}
    better = {"sharded_optimizer": "optimizer", "overlap_gradients": "overlap", "expandable_segments": "allocator"}
    fields |= {field: True for field, aspect in better.items() if aspect not in keep}
    base = replace(run, **fields, blocking=blocking, sequence_parallel=True)
    if "overlap" not in keep:
        base = replace(base, overlap_parameters=base.sharded_optimizer)
    flash = run.attention == "flash"
    scopes = (run.recompute,) if "recompute" in keep else asked.engine.scopes
    return _Whole(
        weighing.model,
        weighing.cluster,
        run.global_batch,
        replace(asked.engine, context=asked.engine.context and flash, scopes=scopes),
        schedules,
        weighing.framework,
        base,
        bpipe=own and asked.bpipe,
        tensor=run.tensor if "tensor" in keep else None,
        stages=run.stages if "pipeline" in keep else None,
        micro_batch=run.micro_batch if "micro-batch" in keep else None,
        context=run.context if "context" in keep else None,
        divided=weighing.divided,
        own=(run.expert, run.expert_ways) if "experts" in keep else None,
    )


def _refuse(asked: Asked) -> None:
    """Raise EstimateError for a run of which nothing fits, with what is missing."""
    keep = asked.keep | NARROWER
    try:
        found = search(_question(asked, asked.schedules or _STOCK, keep, bool(asked.schedules)), 1).plans
    except EstimateError as error:
        kept = f"; or keep less than {', '.join(sorted(asked.keep))}" if asked.keep else ""
        raise EstimateError(f"{error}{kept}") from None
    free = sorted(set(ASPECTS) - asked.keep)
    kept = ",".join(sorted(asked.keep)) if len(free) > 1 else f"all but {free[0]}"
    raise EstimateError(f"keep={kept}: nothing that fits has these, and {len(found)} other does: keep less")
