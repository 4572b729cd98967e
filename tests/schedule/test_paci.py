"""PACI: one weight version, and a bound on the updates between a micro-batch's forward and its backward."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import Action, ScheduleError, Stream, choose, find, verify
from evenpipe.schedule.spec import alternate, units
from evenpipe.simulate import Costs, simulate
from tests.schedules import build, program


def drifts(row):
    """By micro-batch, the updates between its forward and its backward."""
    updates, found = 0, {}
    for action in row:
        updates += action.kind == "U"
        if action.kind == "F":
            found[action.micro_batch] = -updates
        elif action.kind == "B":
            found[action.micro_batch] += updates
    return found


def paci(p, m, batches, ahead=None, at=0):
    """The schedule, in which stage ``at`` runs ``ahead`` forwards ahead of its backwards."""
    built = build("paci", p, m, batches=batches)
    if ahead is None:
        return built
    row = []
    every = units(m * batches)
    for action in alternate(every, every, ahead):
        row.append(action)
        if action.kind == "B" and (action.micro_batch + 1) % m == 0:
            row.append(Action("U", action.micro_batch // m))
    return replace(built, bound=p + ahead, actions=(*built.actions[:at], tuple(row), *built.actions[at + 1 :]))


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 6))
def test_the_drift_is_bounded_and_the_bound_is_reached(p, m, batches):
    """Δ_max ≤ ⌈(N − 1)/a⌉ on the first stage, and less on each after it (arXiv 2606.07881)."""
    for stage, row in enumerate(build("paci", p, m, batches=batches).actions):
        most, bound = max(drifts(row).values()), -(-(p - 1 - stage) // m)
        assert most <= bound
        if (batches - 1) * m >= p - 1 - stage:
            assert most == bound
        every = units(m * batches)
        assert [action for action in row if action.kind != "U"] == [*alternate(every, every, p - 1 - stage)]


@given(st.integers(2, 6), st.integers(1, 6), st.data())
def test_an_order_that_drifts_further_is_refused(p, m, data):
    """The first stage, as far ahead of its backwards as the bound lets it be, and one forward further."""
    allowed = -(-(p - 1) // m) * m
    verify(paci(p, m, 9, ahead=allowed))
    bound = -(-(p - 1) // m)
    with pytest.raises(ScheduleError, match=f"comes {bound + 1} updates after its forward; paci allows {bound} on"):
        verify(paci(p, m, 9, ahead=allowed + 1))


def test_no_stage_waits_from_its_first_backward_on():
    """No bubble but the stream's two ends: a batch takes the time of its own compute."""
    costs = Costs((1.0,) * 4, (2.0,) * 4)
    longer, shorter = (simulate(program("paci", 4, 4, batches=count), costs).makespan_ms for count in (9, 5))
    assert longer - shorter == 4 * 4 * 3.0


def test_a_run_reads_one_batch_ahead():
    spec = find("paci")
    assert [str(step.action) for step in Stream(spec, 2, 2).call(0, 0)] == ["F0", "F1", "B0", "F2", "B1", "U0"]
    assert [str(step.action) for step in Stream(spec, 2, 2).call(0, 1)] == ["F3", "B2", "F4", "B3", "U1"]
    with pytest.raises(ScheduleError, match="micro_batches=3: a run under paci needs at least as many as there are"):
        Stream(spec, 4, 3)


def test_a_table_of_it_is_verified_by_the_same_rule(tmp_path):
    path = tmp_path / "S.txt"
    path.write_text(str(paci(3, 2, 3)))
    assert choose(f"file:{path}").needs == {"stream", "in_place"}
    path.write_text(str(paci(3, 2, 3, ahead=3)))
    with pytest.raises(ScheduleError, match="comes 2 updates after its forward; paci allows 1 on this stage"):
        choose(f"file:{path}")
