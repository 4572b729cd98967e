"""The costs of a model's parts out of a trace of one iteration (``evenpipe.trace/1``), under whatever schedule."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from pydantic import ValidationError

from evenpipe.order_search.costs import FORMAT, Part, Placement, RunCosts
from evenpipe.report.timeline import TRACE
from evenpipe.schedule import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Kind,
    ScheduleError,
    loop,
    parse,
    vee,
)
from evenpipe.wording.validation import first_message

__all__ = ["costs_of_trace"]

_STAGE: Final = re.compile(r"stage (\d+)\b")
_Times = dict[tuple[int, int], dict[Kind, list[float]]]


def costs_of_trace(
    path: Path,
    traced: str,
    placement: Placement,
    message_ms: float = 0.0,
    saved_bytes: Sequence[int] = (1,),
    recomputed_bytes: Sequence[int] | None = None,
    memory_bytes: Sequence[int] | None = None,
    peer_bytes_per_ms: float | None = None,
    host_bytes_per_ms: float | None = None,
) -> RunCosts:
    """Return the median times of every part, over micro-batches and over all processes of its stage.

    traced: how the run placed its parts ("vee", or chunk by chunk); placement: how they are to be placed. Both have the
    same parts in the order of the model. saved_bytes, recomputed_bytes (None: no part is computed again), memory_bytes:
    one for all parts and stages, or one for each. A backward that the run did not split counts half for each gradient.

    Raises :class:`ScheduleError`, one line, for a file that is no trace of whole stages.
    """
    times = _times(path)
    stages, chunks = 1 + max(stage for stage, _ in times), 1 + max(chunk for _, chunk in times)
    if traced == "vee" and chunks != 2:
        raise ScheduleError(f"traced=vee: the run had {chunks} model chunks a stage, and a V has 2: give loop")
    places = vee(stages) if traced == "vee" else loop(stages, chunks)
    for stage, chunk in places.order:
        kinds = set(times.get((stage, chunk), ()))
        if FORWARD not in kinds or not (BACKWARD in kinds or {INPUT_GRADIENT, WEIGHT_GRADIENT} <= kinds):
            raise ScheduleError(f"trace={path}: has no forward, or no backward, of chunk {chunk} on stage {stage}")
    count = len(places.order)
    sizes = _each("saved_bytes", saved_bytes, count, "part")
    again = [None] * count if recomputed_bytes is None else _each("recomputed_bytes", recomputed_bytes, count, "part")
    caps = None if memory_bytes is None else _each("memory_bytes", memory_bytes, stages, "stage")
    if (placement == "straight") != (chunks == 1) or (placement == "vee" and chunks != 2):
        raise ScheduleError(f"placement={placement}: the run had {chunks} parts a stage: give another placement")
    try:
        parts = [_part(times[place], size, left) for place, size, left in zip(places.order, sizes, again, strict=True)]
        return RunCosts(
            format=FORMAT,
            placement=placement,
            parts=parts,
            message_ms=message_ms,
            memory_bytes=caps,
            peer_bytes_per_ms=peer_bytes_per_ms,
            host_bytes_per_ms=host_bytes_per_ms,
        )
    except ValidationError as error:
        raise ScheduleError(f"trace={path}: {first_message(error, 'the trace')}: trace another iteration") from None


def _each(name: str, given: Sequence[int], count: int, of: str) -> list[int]:
    if len(given) not in (1, count):
        raise ScheduleError(f"{name}: {len(given)} numbers for {count} {of}s: give one, or one for each {of}")
    return list(given) * (count if len(given) == 1 else 1)


def _part(times: dict[Kind, list[float]], saved_bytes: int, recomputed_bytes: int | None) -> Part:
    half_ms = median(times.get(BACKWARD, [0.0])) / 2
    return Part(
        forward_ms=median(times[FORWARD]),
        input_gradient_ms=median(times.get(INPUT_GRADIENT, [half_ms])),
        weight_gradient_ms=median(times.get(WEIGHT_GRADIENT, [half_ms])),
        saved_bytes=saved_bytes,
        recomputed_bytes=recomputed_bytes,
    )


def _times(path: Path) -> _Times:
    """By stage and chunk, the milliseconds of each kind of compute."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != TRACE:
            raise ValueError
        events = document["traceEvents"]
        names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
        found: _Times = defaultdict(lambda: defaultdict(list))
        for one in events:
            stage = _STAGE.search(names.get(one["pid"], ""))
            if one["ph"] == "X" and stage is not None and (action := parse(one["name"])).kind in COMPUTE:
                found[int(stage[1]), action.chunk][action.kind].append(one["dur"] / 1e3)
    except OSError as error:
        raise ScheduleError(f"trace={path}: {error.strerror}: name a trace {TRACE}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ScheduleError(f"trace={path}: is no trace {TRACE}: name what --evenpipe-trace or --trace wrote") from None
    if not found:
        raise ScheduleError(f"trace={path}: has no compute: name what --evenpipe-trace or --trace wrote")
    return found
