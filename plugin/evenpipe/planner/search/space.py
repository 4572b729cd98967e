"""Which runs there are: the constraints of BPipe §4.2, over (t, c, p, d, e, v, b, recompute, layout, placement)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from typing import Final, NamedTuple

from evenpipe.planner.run import Placement, Run
from evenpipe.planner.search.blocks import Divided, Profile
from evenpipe.planner.search.bounds import least_bytes_of_any_layout
from evenpipe.planner.search.question import Question
from evenpipe.schedule import Places, ScheduleError, Size, Spec, find

__all__ = ["Shape", "Way", "shapes", "ways"]

#: Micro-batches in a row that kFkB is tried with; more of them hide slower links and hold as many times as much.
_GROUPS: Final = (2, 4)
#: Fewest stages at which BPipe evicts anything (§3.3).
_LEVELLED: Final = 4


class Shape(NamedTuple):
    """How model and batch are divided; ``run`` has no schedule yet. ``nbytes``: its fullest stage needs at least.

    Where that is more than there is, nobody has asked how layers are laid out.
    """

    run: Run
    profile: Profile
    nbytes: int


class Way(NamedTuple):
    """A schedule of a shape's parts. ``size`` is what to build of it, for one batch."""

    spec: Spec
    size: Size
    places: Places
    bpipe: bool


def shapes(question: Question, divided: Divided) -> Iterator[Shape]:
    """All of them. t divides heads and a node, t × c × p × d are all GPUs, b divides a replica's samples.

    Those are the most that ``question.samples`` has for each replica alike: all of them where d divides them (BPipe's
    B mod (mb × d) = 0), else less, since more is not safe.
    """
    cluster, engine = question.cluster, question.engine
    for t in question.tensors:
        base = question.base(t)
        for c, p in question.divisions(t):
            d = cluster.gpus // (t * c * p)
            samples = question.samples // d
            if not samples:
                continue
            for e, b, scope in product(question.experts(d * c), question.micro_batches(samples), engine.scopes):
                run = replace(
                    base,
                    stages=p,
                    data=d,
                    context=c,
                    expert=e,
                    micro_batch=b,
                    recompute=scope,
                    global_batch=samples * d,
                )
                yield from _laid_out(question, run, divided.of(run))


def _laid_out(question: Question, run: Run, profile: Profile) -> Iterator[Shape]:
    """With every number of model chunks, layout and placement."""
    layers, device = question.model.layers, question.cluster.device
    least = least_bytes_of_any_layout(profile.parameters(run.stages), run, device)
    for v in _chunks(layers, run.stages):
        parts = run.stages * v
        even = layers % parts == 0
        if not even and not question.engine.uneven:
            continue
        if least > device.memory_gib * 2**30:
            yield Shape(replace(run, chunks=v), profile, least)
            continue
        layouts: list[tuple[int, ...] | None] = [None] if even else []
        if question.engine.uneven and parts > 1:
            balanced = profile.balanced(parts)
            if not even or len(set(balanced)) > 1:
                layouts.append(balanced)
        for layout, placement in product(layouts, _placements(question, run)):
            yield Shape(replace(run, chunks=v, layout=layout, placement=placement), profile, least)


def _chunks(layers: int, stages: int) -> list[int]:
    """Model chunks a stage of which all have as many layers, where ends may count as one each (Llama 3 §3.3.2)."""
    if stages == 1:
        return [1]
    most = (layers + 2) // stages
    return [1, *(v for v in range(2, most + 1) if any((layers + ends) % (stages * v) == 0 for ends in range(3)))]


def _placements(question: Question, run: Run) -> list[Placement]:
    """Both only where one of them keeps something in a node that the other does not."""
    # Megatron numbers no pipeline before replicas that share out experts (`parallel_state.py`).
    apart = run.data > 1 and run.stages > 1 and question.cluster.nodes > 1 and run.expert == 1
    return [one for one in question.engine.placements if apart or one == "replicas"]


def ways(run: Run, schedules: tuple[str, ...], bpipe: bool) -> Sequence[Way]:
    """Every schedule of these that can be of a shape, with and without BPipe."""
    # Ranks that are numbered along the pipeline are not pair-adjacent.
    return _ways(run.stages, run.micro_batches, run.chunks, schedules, bpipe and run.placement == "replicas")


@lru_cache(maxsize=4096)
def _ways(stages: int, micro_batches: int, chunks: int, schedules: tuple[str, ...], bpipe: bool) -> Sequence[Way]:
    if stages == 1:  # gradients are accumulated, there is no pipeline
        if "1f1b" not in schedules:
            return []
        return [Way(find("1f1b"), Size(1, micro_batches), _places("1f1b", 1, 1), False)]
    found = []
    for spec in map(find, schedules):
        least, most = spec.chunks
        if chunks < least or (most is not None and chunks > most):
            continue
        for k in (1,) if "groups" not in spec.needs else _GROUPS:
            size = Size(stages, micro_batches, chunks, k)
            if k > micro_batches or not _possible(spec, size):
                continue
            places = _places(spec.name, stages, chunks)
            found.append(Way(spec, size, places, False))
            if bpipe and spec.balanced is not None and stages >= _LEVELLED:
                found.append(Way(spec, size, places, True))
    return found


@cache
def _places(schedule: str, stages: int, chunks: int) -> Places:
    return find(schedule).places(Size(stages, 1, chunks))


def _possible(spec: Spec, size: Size) -> bool:
    try:
        spec.fitted(size)
    except ScheduleError:
        return False
    return True
