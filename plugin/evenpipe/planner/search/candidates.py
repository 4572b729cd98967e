"""The runs of a question, by the constraints of BPipe §4.2, each with bounds on its time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import count, product
from statistics import fmean
from typing import Final, Literal, NamedTuple

from evenpipe.descriptions import Model
from evenpipe.planner.iteration import HandOver
from evenpipe.planner.run import Placement, Run
from evenpipe.planner.search.bounds import (
    Edges,
    edges_of,
    least_bytes_of_any_layout,
    least_live,
    least_ms,
)
from evenpipe.planner.search.profiles import Divided, PartCost, Profile
from evenpipe.planner.search.question import Question
from evenpipe.planner.search.shape_costs import Held, Shape, ShapeCosts
from evenpipe.planner.stage_nodes import Positions, positions_of
from evenpipe.schedule import Places, ScheduleError, Size, Spec, find

__all__ = [
    "Candidate",
    "Family",
    "Group",
    "Way",
    "candidates",
    "candidates_of",
    "families_of",
    "groups",
    "kinds_of",
    "products_of",
    "ways",
]

Kind = Literal["schedule", "bpipe", "recompute", "placement", "layout", "precision", "gradients", "dispatcher"]


class Family(NamedTuple):
    """``value`` says which of its kind, in words."""

    kind: Kind
    value: str


def families_of(question: Question, run: Run, allowed: bool) -> Iterator[Family]:
    """Yield the families that a run belongs to; only the schedule's if a plan may not have that schedule."""
    yield Family("schedule", run.schedule if run.stages > 1 else "no pipeline")
    if not allowed:
        return
    yield Family("bpipe", "with BPipe" if run.bpipe else "without BPipe")
    yield Family("recompute", f"recompute {run.recompute}")
    if run.stages > 1:
        if run.data > 1 and not run.bpipe:  # whose pairs come before replicas, whatever is asked for
            yield Family("placement", f"{run.placement} in one node")
        yield Family("layout", "even stages" if run.layout is None else "uneven stages")
    yield from products_of(question, run)


def products_of(question: Question, run: Run) -> Iterator[Family]:
    """Yield the families of what a question asks several of: precisions, gradients, dispatchers of experts' tokens."""
    every = (question.asked, *question.further)
    if len({(one.precision, one.quantized) for one in every}) > 1:
        yield Family("precision", f"products in {run.quantized or run.precision}")
    if len({one.gradients_in_fp32 for one in every}) > 1:
        yield Family("gradients", f"gradients in {'fp32' if run.gradients_in_fp32 else 'half precision'}")
    if len({one.dispatcher for one in every}) > 1:
        yield Family("dispatcher", f"dispatcher {run.dispatcher}")


#: Micro-batches in a row that kFkB is tried with at most.
_MOST_GROUPED: Final = 16
#: And those that it is tried with though shorter ones hide a message: uneven stages wait less for each other then.
_ALWAYS_GROUPED: Final = 4
#: Model chunks of a stage up to which every number is tried, whatever it leaves over.
_UNEVEN: Final = 8
#: Fewest stages at which BPipe evicts anything (§3.3).
_LEVELLED: Final = 4


class Way(NamedTuple):
    """A schedule of a shape's parts. ``size`` is what to build of it, for one batch; ``live``: `least_live`.

    edges: `edges_of`.
    """

    spec: Spec
    size: Size
    where: Positions
    bpipe: bool
    live: Sequence[int]
    edges: Edges | None


class Group(NamedTuple):
    """Runs that differ in chunks, layout, placement and schedule only; ``run`` has none of them yet.

    ms: of a sample, at least: the work of the mean stage, 0 where it does not fit. nbytes: the fullest stage needs at
    least. number: of which it is among all groups.
    """

    ms: float
    number: int
    run: Run
    profile: Profile
    nbytes: int


def groups(question: Question) -> Iterator[Group]:
    """All of them. t divides heads and a node, t × c × p × d are all GPUs, b divides a replica's samples.

    Those are the most that ``question.samples`` has for each replica alike: all of them where d divides them (BPipe's
    B mod (mb × d) = 0), else less, since more is not safe.
    """
    cluster, number = question.cluster, count()
    divided, have = question.divided or Divided(question.model, question.nodes), cluster.device.memory_gib * 2**30
    for base in (one for tensor in question.tensors for one in question.bases(tensor)):
        t = base.tensor
        modules = question.modules(base)
        for c, p in question.divisions(t):
            d = cluster.gpus // (t * c * p)
            samples = question.samples // d
            if not samples:
                continue
            for (e, ways), scope in product(question.experts(d * c, t), question.scopes):
                if e == 1 and base.dispatcher != question.asked.dispatcher:
                    continue  # nothing is dispatched
                for b in question.micro_batches(samples):
                    run = base.but(
                        stages=p,
                        data=d,
                        context=c,
                        expert=e,
                        expert_tensor=None if ways == t else ways,
                        micro_batch=b,
                        recompute=scope,
                        recomputed_modules=modules if scope == "selective" else Run.recomputed_modules,
                        global_batch=samples * d,
                    )
                    profile = divided.of(run)
                    whole = profile.whole(p)
                    least = min(least_bytes_of_any_layout(whole, run, kind.device) for kind in cluster.kinds)
                    ms = profile.least_ms(run) if least <= have else 0.0
                    yield Group(ms, next(number), run, profile, least)
                    if least > have:
                        break  # as larger micro-batches take no less


def _shapes(question: Question, group: Group) -> Iterator[Shape]:
    """With every number of model chunks, layout and placement; of what is too large anyway, with one or two chunks."""
    _, _, run, profile, least = group
    layers, uneven = question.model.layers, question.engine.uneven
    chunks = [v for v in _chunks(question.model, run.stages) if uneven or layers % (run.stages * v) == 0]
    if least > question.cluster.device.memory_gib * 2**30:
        yield from (Shape(run.but(chunks=v), profile, least) for v in chunks[:2])
        return
    for v in chunks:
        parts = run.stages * v
        layouts = [True] * (layers % parts == 0) + [False] * (uneven and parts > 1)
        for even, placement in product(layouts, _placements(question, run)):
            yield Shape(run.but(chunks=v, placement=placement), profile, least, even)


def kinds_of(question: Question, run: Run) -> Iterator[Family]:
    """Yield the families, schedules left out, that there may be runs of in the group of ``run``."""
    yield from products_of(question, run)
    yield Family("recompute", f"recompute {run.recompute}")
    yield Family("bpipe", "without BPipe")
    if question.bpipe and run.stages >= _LEVELLED:
        yield Family("bpipe", "with BPipe")
    if run.stages > 1:
        placements = _placements(question, run) if run.data > 1 else []
        yield from (Family("placement", f"{one} in one node") for one in placements)
        kinds = ["even"] * (question.model.layers % run.stages == 0) + ["uneven"] * question.engine.uneven
        yield from (Family("layout", f"{kind} stages") for kind in kinds)


def _chunks(model: Model, stages: int) -> list[int]:
    """Model chunks a stage: few, or those of which all have as many layers.

    Both ends may count as a layer (Llama 3 §3.3.2), and layers that predict further tokens.
    """
    if stages == 1:
        return [1]
    most, counted = (model.layers + 2) // stages, model.layers + 2 + model.mtp_layers
    fit = {v for v in range(2, most + 1) for whole in range(model.layers, counted + 1) if whole % (stages * v) == 0}
    return sorted({1, *range(2, min(most, _UNEVEN) + 1), *fit})


def _placements(question: Question, run: Run) -> list[Placement]:
    """Both only where one of them keeps something in a node that the other does not."""
    # Megatron numbers no pipeline before replicas that share out experts (`parallel_state.py`).
    apart = run.data > 1 and run.stages > 1 and question.cluster.nodes > 1 and run.expert == 1
    return [one for one in question.engine.placements if apart or one == "replicas"]


def ways(run: Run, schedules: tuple[str, ...], bpipe: bool) -> Sequence[Way]:
    """Return every schedule of these that can be of a shape, with and without BPipe."""
    # Ranks that are numbered along the pipeline are not pair-adjacent.
    pairs = bpipe and run.placement == "replicas"
    return _ways(run.stages, run.micro_batches, run.chunks, schedules, pairs, run.overlap_experts)


@lru_cache(maxsize=4096)
def _ways(
    stages: int, micro_batches: int, chunks: int, schedules: tuple[str, ...], bpipe: bool, fused: bool
) -> Sequence[Way]:
    if stages == 1:  # gradients are accumulated, there is no pipeline
        if "1f1b" not in schedules:
            return []
        alone = find("1f1b")
        return [_way(alone, Size(1, micro_batches), _places("1f1b", 1, 1), False)]
    found = []
    specs = [find(name) for name in schedules]
    if fused:  # Megatron has a forward beside a backward with several chunks a stage only
        specs = [spec.fused_form for spec in specs if spec.fused_form is not None]
    for spec in specs:
        least, most = spec.chunks
        if chunks < least or (most is not None and chunks > most):
            continue
        for k in range(2, min(_MOST_GROUPED, micro_batches) + 1) if "groups" in spec.needs else (1,):
            size = Size(stages, micro_batches, chunks, k)
            if not _possible(spec, size):
                continue
            places = _places(spec.name, stages, chunks)
            found.append(_way(spec, size, places, False))
            if bpipe and spec.balanced is not None and stages >= _LEVELLED:
                found.append(_way(spec, size, places, True))
    return found


def _way(spec: Spec, size: Size, places: Places, bpipe: bool) -> Way:
    return Way(spec, size, positions_of(places), bpipe, least_live(spec, size, bpipe), edges_of(spec, size))


@cache
def _places(schedule: str, stages: int, chunks: int) -> Places:
    return find(schedule).places(Size(stages, 1, chunks))


def _possible(spec: Spec, size: Size) -> bool:
    try:
        spec.fitted(size)
    except ScheduleError:
        return False
    return True


class Candidate(NamedTuple):
    """``ms``: of a sample, at least, times the iterations that the same loss takes; ``nbytes``: of the fullest stage.

    ms is 0 where that is too much already.
    order: of equals, what comes first: without BPipe, with fewer parts. allowed: a plan may have it.
    """

    ms: float
    order: tuple[int, ...]
    nbytes: int
    run: Run
    families: tuple[Family, ...]
    allowed: bool


def candidates(question: Question) -> Iterator[Candidate]:
    """All of them, what does not fit too."""
    for group in groups(question):
        yield from candidates_of(question, group)


def candidates_of(question: Question, group: Group) -> Iterator[Candidate]:
    """Yield those of a group."""
    numbers = count()
    for shape in _shapes(question, group):
        yield from _of_shape(question, shape, group.number, numbers)


def _of_shape(question: Question, shape: Shape, group: int, numbers: Iterator[int]) -> Iterator[Candidate]:
    run = shape.run
    have = question.cluster.device.memory_gib * 2**30
    same = ShapeCosts(question, shape)
    largest: set[tuple[str, bool]] = set()  # schedules of which no larger group is of use
    for way in ways(run, question.schedules, question.bpipe):
        split, stream = "split" in way.spec.needs, "stream" in way.spec.needs
        if split and run.recompute == "full":  # slower than 1F1B that recomputes as much, or less, in that memory
            continue
        sharded = stream and max(run.tensor, run.expert) > 1 and not question.engine.delayed_sharded
        allowed = not question.refused(way.spec, run.stages) and not sharded
        if (way.bpipe and not allowed) or (way.spec.name, way.bpipe) in largest:
            continue
        layout, parts = same.laid_out(way.where, way.bpipe) if shape.nbytes <= have else (None, [])
        if layout and layout.even:
            continue
        tried = run.but(
            layout=layout and layout.layers,
            further_part=layout and layout.further,
            schedule=way.spec.name,
            bpipe=way.bpipe,
            group_size=way.size.group_size,
            overlap_parameters=run.overlap_parameters and not stream,
        )
        nbytes = shape.nbytes
        if parts:
            held = Held(way.live, way.spec.weight_versions)
            if lighter := same.lighter(layout, way.where, held, tried):
                layout, parts = lighter
                tried = tried.but(layout=layout and layout.layers, further_part=layout and layout.further)
            least = same.least_bytes(parts, way.where, held, tried)
            nbytes = max(nbytes, *least)
        ms = 0.0
        if nbytes <= have:
            over = same.hand_over(way.where, tried)
            ms = least_ms(parts, way.where, tried, over, split, stream, way.edges)
            ms += same.end_ms(parts, way.where, tried)
        if "groups" in way.spec.needs and (nbytes > have or _ends_groups(parts, over, way.size)):
            largest.add((way.spec.name, way.bpipe))
        yield Candidate(
            ms / run.global_batch * tried.iterations,
            (way.bpipe, run.stages * run.chunks, way.size.group_size, group, next(numbers)),
            nbytes,
            tried,
            tuple(families_of(question, tried, allowed)),
            allowed,
        )


def _ends_groups(parts: Sequence[PartCost], over: HandOver, size: Size) -> bool:
    """Return whether a message is under way for no longer than the other forwards of a large group take, on the mean.

    Then larger groups hide no more (Ada-Grouper §4.1). They hold more, so that with the first that does not fit the
    curve of its memory limit (§4.2) is at its end for that size of micro-batches.
    """
    if size.group_size < _ALWAYS_GROUPED:
        return False
    forward_ms = 1e3 * fmean(part.time.forward for part in parts)
    return over.latency_ms + over.transmit_ms <= (size.group_size - 1) * forward_ms
