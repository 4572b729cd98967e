"""PipeDream-2BW's Algorithm 1 finds what trying everything finds, with the paper's slips corrected."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.two_bw.parallel_pipelines import Blocks, Configuration, Execution, Measured, Profiled, partition

EXECUTIONS: tuple[Execution, ...] = ("no pipeline", "gpipe", "flush", "2bw")


def blocks(
    count: int = 24, seconds: float = 1e-3, fixed: float = 1e-3, weights: float = 1e9, saved: float = 1e8
) -> Blocks:
    return Blocks(
        count,
        seconds=lambda b: fixed + seconds * b,
        weight_bytes=weights,
        saved=lambda b: saved * b,
        inputs=lambda b: saved * b / 20,
        message=lambda b: saved * b / 100,
        server=8,
        high=100e9,
        low=3e9,
    )


def by_hand(of: Blocks, w: int, d: int, b: int, r: bool, g: int, execution: str) -> tuple[float, float]:
    """Samples/s and bytes, formula by formula."""
    m = g if execution == "no pipeline" else d * g
    compute = of.seconds(b) * of.count / d * (4 / 3 if r else 1)
    inside = w * d <= 8
    depth = of.high if (d <= 8 if of.pipelines_within else inside) else of.low
    width = of.high if (inside if of.pipelines_within else w <= 8) else of.low
    sent = 2 * of.message(b) / depth if d > 1 else 0
    reduced = 2 * (w - 1) / w * (of.weight_bytes / d) / width / m
    slowest = {
        "no pipeline": d * max(compute + sent, reduced),
        "2bw": max(compute, sent, reduced),
        "flush": max(compute, sent, reduced) * (m + d - 1) / m,
        "gpipe": max(compute, sent, reduced) * (m + d - 1) / m,
    }[execution]
    stash = of.inputs(b) if r else of.saved(b)
    live = {"no pipeline": 1, "gpipe": m, "flush": d, "2bw": d}[execution]
    again = of.saved(b) - of.inputs(b) if r else 0
    versions = 2 if execution == "2bw" else 1
    return w * b / slowest, (versions * of.weight_bytes + live * stash + again) / d


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(1, 20),
    samples=st.integers(1, 48),
    gib=st.floats(0.02, 4),
    count=st.sampled_from([6, 12, 24]),
    seconds=st.floats(1e-4, 1e-2),
    fixed=st.floats(0, 1e-2),
    within=st.booleans(),
)
def test_it_is_the_best_of_all(
    workers: int, samples: int, gib: float, count: int, seconds: float, fixed: float, within: bool
) -> None:
    of = replace(blocks(count, seconds, fixed), pipelines_within=within)
    best = 0.0
    for w in range(1, workers + 1):
        for d in (d for d in range(1, workers + 1) if w * d <= workers and count % d == 0):
            for execution in EXECUTIONS:
                for b in range(1, samples + 1):
                    g = samples // (w * b * (1 if execution == "no pipeline" else d))
                    for r in (False, True) if g else ():
                        speed, nbytes = by_hand(of, w, d, b, r, g, execution)
                        best = max(best, speed if nbytes <= gib * 1e9 else 0.0)
    found = partition(of, workers, gib * 1e9, samples, EXECUTIONS)
    assert (found.samples_per_second if found else 0.0) == pytest.approx(best)
    if found:
        one = found.configuration
        assert one.w * one.d <= workers
        assert one.w * one.b * one.m <= samples
        assert one.m == found.g * (1 if one.execution == "no pipeline" else one.d)


def test_eight_replicas_are_in_a_server_of_eight() -> None:
    of = replace(blocks(fixed=0, seconds=1e-6), count=1, weight_bytes=1e10)
    eight, nine = (of.throughput(Configuration(w, 1, 1, False, 1)) for w in (8, 9))
    assert eight is not None
    assert nine is not None
    assert eight / 8 > 20 * nine / 9


def test_recomputation_keeps_the_inputs_of_all_in_flight() -> None:
    of = blocks()
    shallow, kept = of.memory(Configuration(1, 4, 2, True, 4)), 4 * of.inputs(2)
    assert shallow == pytest.approx((2 * of.weight_bytes + kept + of.saved(2) - of.inputs(2)) / 4)


def test_width_counts_in_throughput() -> None:
    of = replace(blocks(), weight_bytes=0.0)
    one, two = (of.throughput(Configuration(w, 2, 4, False, 8)) for w in (1, 2))
    assert one is not None
    assert two == pytest.approx(2 * one)


def test_gpipe_runs_out_of_memory_where_2bw_does_not() -> None:
    """Figure 8: it stashes a batch's micro-batches, however few stages there are."""
    of = blocks(weights=1e8)
    gpipe, two = (of.memory(Configuration(1, 8, 1, True, 64, one)) for one in ("gpipe", "2bw"))  # type: ignore[arg-type]
    assert gpipe is not None
    assert two is not None
    assert gpipe > 1.5 * two


def test_what_was_measured_end_to_end_is_taken_as_it_is() -> None:
    """Lines 180 to 190: Table 1's BERT-48 and BERT-192, of which what is checked is found."""
    bert_48 = {(8, 8): 69.0, (16, 4): 25.0, (1, 64): 15.0}
    bert_192 = {(2, 32): 18.0, (4, 16): 21.0}
    for measured, wanted in ((bert_48, (8, 8)), (bert_192, (4, 16))):
        runs = {Configuration(w, d, 1, True, 16 * d): Measured(speed, 15e9) for (w, d), speed in measured.items()}
        found = partition(Profiled(runs), 64, 16e9, 1024, ("2bw",))
        assert found is not None
        assert (found.configuration.w, found.configuration.d, found.g) == (*wanted, 16)


def test_where_nothing_fits_or_is_safe_there_is_nothing() -> None:
    assert partition(blocks(), 8, 1e6, 64) is None
    assert partition(Profiled({}), 8, 1e12, 64) is None
