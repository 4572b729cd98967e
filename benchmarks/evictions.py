"""Where searched orders that evict, or swap, beat those that do not: whole stages, and a V, by messages. By simulation.

The parts are those of `front.py`, "even" and "uneven", with messages that take so much of a stage's forward. "V": what
is searched for halves of stages in a V, within the memory. "evicting": the same for whole stages that may evict to
their partners, for which a micro-batch takes one forward each way. "swapping": the V again, whose stages may swap to
their hosts, each by a link of its own of that speed. Memory and speed are those of `front.py`. "known"
is the fastest schedule with a name that fits, whose evictions take as long. It "wins" by more than 0.05 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from front import UNIT_BYTES, halves
from harness import Benchmark, positive, progress_bar
from rich.table import Table

from evenpipe.order_search.search import Effort
from evenpipe.simulate.front import Front, front

#: Milliseconds: a part takes about one.
FORWARD_MS: Final = 2.0
MESSAGES: Final = (0.1, 0.5)


def lines(case: dict[str, Any], found: Front, swapping: Front) -> Iterator[dict[str, Any]]:
    of_bytes, swapped = ({one.peak_bytes: one for one in each.searched} for each in (found, swapping))
    for evicting in found.evicting:  # a whole stage may need more than a V
        point = of_bytes[evicting.peak_bytes]
        best = found.best(point.peak_bytes)
        known_speed = None if best is None else found.limit_ms / best.batch_ms
        speeds = found.limit_ms / point.batch_ms, found.limit_ms / evicting.batch_ms
        yield {
            **case,
            "memory": point.peak_bytes / found.base_bytes,
            "known": None if best is None else best.name,
            "known_speed": known_speed,
            "vee_speed": speeds[0],
            "evicting_speed": speeds[1],
            "swapping_speed": found.limit_ms / swapped[evicting.peak_bytes].batch_ms,
            "evicting_wins": speeds[1] > max(speeds[0], known_speed or 0) * 1.0005,
        }


def table(results: list[dict[str, Any]]) -> Table:
    """The same for people."""
    shown = Table("p", "m", "parts", "message", "memory", "known", "speed", "V", "evicting", "gain", "swapping")
    for one in results:
        known = ("–", "–") if one["known"] is None else (one["known"], f"{one['known_speed']:.3f}")
        speeds = [one["vee_speed"], one["evicting_speed"]]
        gain = f"{speeds[1] / max(speeds[0], one['known_speed'] or 0) - 1:+.1%}"
        case = str(one["stages"]), str(one["micro_batches"]), one["parts"], f"{one['message']:g}"
        shown.add_row(
            *case,
            f"{one['memory']:.3g}",
            *known,
            *(f"{speed:.3f}" for speed in speeds),
            gain,
            f"{one['swapping_speed']:.3f}",
        )
    return shown


def main() -> None:
    benchmark = Benchmark("evictions", __doc__ or "", repeats=1)
    benchmark.parser.add_argument("--stages", type=positive, nargs="+", default=[8], help="(default 8)")
    benchmark.parser.add_argument("--seconds", type=float, default=0.3, help="of each search (default 0.3)")
    arguments = benchmark.parser.parse_args()
    cases = [
        (stages, kind, message) for stages in arguments.stages for kind in ("even", "uneven") for message in MESSAGES
    ]
    results: list[dict[str, Any]] = []
    with progress_bar("evictions", len(cases)) as tick:
        for stages, kind, message in cases:
            speed = 2 * UNIT_BYTES / FORWARD_MS
            costs = halves(kind, stages).model_copy(
                update={"message_ms": message * FORWARD_MS, "peer_bytes_per_ms": speed}
            )
            micro_batches = 2 * stages
            effort = Effort(arguments.seconds)
            found = front(costs, stages, micro_batches, effort)
            hosts = costs.model_copy(update={"peer_bytes_per_ms": None, "host_bytes_per_ms": speed})
            swapping = front(hosts, stages, micro_batches, effort)
            case = {"stages": stages, "micro_batches": micro_batches, "parts": kind, "message": message}
            results += lines(case, found, swapping)
            tick()
    benchmark.report({"seconds": arguments.seconds}, results, table(results))


if __name__ == "__main__":
    main()
