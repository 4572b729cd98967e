"""EvenPipe's function does what Megatron's pipelining functions do with the same arguments, to the last bit."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

sys.path.insert(0, str(Path(__file__).parent))
from schedule_function_cases import (
    BOUND,
    CAPS,
    CASES,
    LONG,
    PARTNERS,
    RECOMPUTED,
    SPLIT,
    STRAIGHT,
    SWAPPING,
    TABLE,
    WORLD,
)
from tiny_pipeline import TIMED, WAITS

from evenpipe.megatron.supported import installed_release
from evenpipe.schedule import EVICT, Programs, Size, choose
from tests.reports import reports
from tests.selected import marked, selected

RELEASE = installed_release()
SCRIPT = Path(__file__).with_name("schedule_function_cases.py")
COMPARED = [(name, engine) for name, case in CASES.items() for engine in case.engines[1:] if "given only" not in name]
ORDERED = [
    (name, engine)
    for name, engine in COMPARED
    if engine not in ("3F3B", "auto", "searched", SWAPPING, "swap 0.8 zb-h1", TABLE, *SPLIT, *STRAIGHT)
]
GROUPED = [name for name, case in CASES.items() if "3F3B" in case.engines]
PARTLY = ["partial recomputation with BPipe", "interleaved, partial recomputation"]
STOCK = {
    "PP1": "forward_backward_no_pipelining",
    "PP4": "forward_backward_pipelining_without_interleaving",
    "PP4 V2": "forward_backward_pipelining_with_interleaving",
}

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each process wrote down of the cases that are looked at."""
    folder = tmp_path_factory.mktemp("schedule_function")
    names = selected(request, "name", others=CASES.keys() - LONG)
    found = reports(SCRIPT, folder, WORLD, json.dumps(sorted(names)))
    assert not [report["failure"] for report in found if "failure" in report]
    return found


def calls(ranks: list[dict[str, Any]], name: str, engine: str, what: str) -> list[list[Any]]:
    """Per rank, `what` of each call."""
    return [[call.get(what) for call in rank["cases"][name][engine]["calls"]] for rank in ranks]


@pytest.mark.parametrize(("name", "engine"), marked(COMPARED, LONG))
def test_a_stage_is_let_go_of_when_its_batch_returns_without_a_garbage_collector(
    ranks: list[dict[str, Any]], name: str, engine: str
) -> None:
    """Else it keeps data iterators, whose worker processes then outlive the training."""
    assert [rank["cases"][name][engine]["left"] for rank in ranks] == [0] * WORLD


@pytest.mark.parametrize(("name", "engine"), marked(COMPARED, LONG))
def test_losses_gradients_and_weights_are_megatrons(ranks: list[dict[str, Any]], name: str, engine: str) -> None:
    assert not any(map(any, calls(ranks, name, "megatron", "error")))
    for what in ("error", "losses", "gradients"):
        assert calls(ranks, name, engine, what) == calls(ranks, name, "megatron", what)
    for rank in ranks:
        assert rank["cases"][name][engine]["weights"] == rank["cases"][name]["megatron"]["weights"]


@pytest.mark.parametrize(("name", "engine"), marked(ORDERED, LONG))
def test_everything_is_called_in_megatrons_order(ranks: list[dict[str, Any]], name: str, engine: str) -> None:
    """Forwards, with what they are told, and backwards; what synchronises gradients and parameters; the finalizing."""
    assert calls(ranks, name, engine, "events") == calls(ranks, name, "megatron", "events")


@pytest.mark.parametrize("name", marked(GROUPED, LONG))
def test_groups_change_nothing_but_the_order_of_forwards_and_backwards(ranks: list[dict[str, Any]], name: str) -> None:
    """What synchronises and finalizes comes where it did: before the first forward, around the last backward."""

    def around(engine: str) -> list[list[list[str]]]:
        last = [f"B0.{call.micro_batches - 1}" for call in CASES[name].calls]
        return [
            [
                [event for event in call if event in ("F0.0", end) or not event.startswith(("F", "B", "recomputes"))]
                for call, end in zip(of_rank, last, strict=True)
            ]
            for of_rank in calls(ranks, name, engine, "events")
        ]

    assert around("3F3B") == around("megatron")
    first = calls(ranks, name, "3F3B", "events")[0][-2]
    assert [event for event in first if event.startswith("F")][:4] == ["F0.0", "F0.1", "F0.2", "F0.3"]


def test_of_the_micro_batches_that_a_stage_holds_so_many_as_asked_for_are_kept_whole(
    ranks: list[dict[str, Any]],
) -> None:
    """Megatron counts them among those that 1F1B holds; groups of three hold three times as many."""
    for engine in ("megatron", "1f1b", "3F3B"):
        for rank in calls(ranks, "partial recomputation", engine, "events"):
            for events in rank:
                whole: set[str] = set()
                most = 0
                for before, event in pairwise(events):
                    if event.startswith("F") and before == "recomputes False":
                        whole.add(event[1:])
                    most = max(most, len(whole))
                    if event.startswith("B"):
                        whole.discard(event[1:])
                assert most == 1


def test_bpipe_evicts_wherever_it_can(ranks: list[dict[str, Any]]) -> None:
    """The first of four stages sends activations away in every case with micro-batches enough."""
    cases = {name: CASES[name] for name in ranks[0]["cases"]}
    cases = {name: case for name, case in cases.items() if "bpipe" in case.engines and case.layout.stages == WORLD}
    enough = [name for name, case in cases.items() if any(call.micro_batches >= 8 for call in case.calls)]
    trained = [name for name in enough if not any(calls(ranks, name, "bpipe", "error")[0])]
    assert [name for name in trained if not ranks[0]["cases"][name]["bpipe"]["evicted"]] == []
    assert len(trained) > len(cases) // 2


@pytest.mark.parametrize("name", ["memory for a searched order"])
def test_an_order_that_a_run_searches_evicts_where_its_memory_is_short(ranks: list[dict[str, Any]], name: str) -> None:
    found = [rank["cases"][name]["searched"] for rank in ranks]
    assert found[0]["evicted"] > 0
    assert [one["evicted"] for one in found[2:]] == [0, 0]


@pytest.mark.parametrize("name", ["memory for a searched order"])
def test_an_order_that_a_run_searches_swaps_where_it_may(ranks: list[dict[str, Any]], name: str) -> None:
    found = [rank["cases"][name][SWAPPING]["counted"] for rank in ranks]
    assert found[0]["swapped_bytes"] > 0
    assert [one["evicted_bytes"] for one in found] == [0] * WORLD


@pytest.mark.parametrize("name", ["swaps by a table"])
def test_a_searched_table_that_swaps_holds_so_many_micro_batches_as_it_was_searched_for(
    ranks: list[dict[str, Any]], name: str
) -> None:
    counted = [rank["cases"][name][TABLE]["counted"] for rank in ranks]
    assert all(one["peak_bytes"] <= 3 * one["largest_saved"] for one in counted)
    assert counted[0]["swapped_bytes"] >= 2 * counted[0]["largest_saved"]


@pytest.mark.parametrize("name", ["swaps"])
def test_swaps_fit_the_worst_stage_under_a_cap(ranks: list[dict[str, Any]], name: str) -> None:
    """The first stage's peak is of 4 micro-batches, of which 2 are whole: 0.75 of it with half swapped, 0.6 with 80 %.

    Within 2 %: storages leave as a whole.
    """

    def worst(engine: str) -> int:
        peaks: list[int] = [rank["cases"][name][engine]["counted"]["peak_bytes"] for rank in ranks]
        return max(peaks)

    assert worst("swap 0.5") <= (0.75 + 0.02) * worst("measured")
    assert worst("swap 0.8") <= (0.6 + 0.02) * worst("measured")
    assert worst("swap 0.8 bpipe") < worst("swap 0.8")


@pytest.mark.parametrize(
    "name",
    [
        *("swaps", "swaps of experts", "caps, from one micro-batch on", "caps, partners", "caps, uneven layout"),
        "interleaved, swaps",
    ],
)
def test_all_stages_fit_under_a_cap(ranks: list[dict[str, Any]], name: str) -> None:
    def worst(engine: str) -> int:
        return max(rank["cases"][name][engine]["counted"]["peak_bytes"] for rank in ranks)

    for engine in {*CAPS, RECOMPUTED, PARTNERS} & ranks[0]["cases"][name].keys():
        assert worst(engine) <= 1.02 * float(engine.split()[1]) * worst("measured"), engine


@pytest.mark.parametrize("name", ["swaps of experts", "caps, uneven layout", "interleaved, swaps"])
def test_layers_are_recomputed_under_a_cap_where_copies_are_slow(ranks: list[dict[str, Any]], name: str) -> None:
    found = [rank["cases"][name] for rank in ranks]
    assert max(cases[RECOMPUTED]["layers"] for cases in found) > 0
    assert not any(cases["cap 0.6"]["layers"] for cases in found)  # whose copies take no time


@pytest.mark.parametrize("name", ["caps, partners"])
def test_stages_send_to_partners_under_a_cap_where_copies_are_slow(ranks: list[dict[str, Any]], name: str) -> None:
    counted = [rank["cases"][name][PARTNERS]["counted"] for rank in ranks]
    assert [one["evicted_bytes"] > 0 for one in counted] == [True, False, False, False]


def test_loads_that_differ_in_size_start_when_their_room_is_free(ranks: list[dict[str, Any]]) -> None:
    """As with one queue, so that no load that waits for its room holds compute up."""
    for name in ranks[0]["cases"].keys() & {"experts without a capacity", "1f1b"}:
        found = {engine: one["queues"] for engine, one in ranks[0]["cases"][name].items() if one["queues"] is not None}
        assert found.pop("bpipe") == ("one" if "experts" in name else "many")
        assert set(found.values()) <= {"many"}
    assert any(one["queues"] == "one" for case in ranks[0]["cases"].values() for one in case.values())


def test_the_cases_reach_what_they_are_for(ranks: list[dict[str, Any]]) -> None:
    """Nothing above holds of two empty records."""

    def events(name: str) -> list[str]:
        return [event for rank in calls(ranks, name, "megatron", "events") for call in rank for event in call]

    forced = "True" if RELEASE.takes_force_all_reduce else "None"
    interleaved = events("interleaved, distributed optimizer")
    assert {"no_sync2 enter", "no_sync2 exit", "F2.7", "B2.7"} <= set(interleaved)
    assert any(event.startswith("param_sync2") for event in interleaved)
    assert any(event.startswith("grad_sync2") for event in interleaved)
    assert {"recomputes True", "recomputes False"} <= set(events("partial recomputation"))
    assert any(" given " in event and event.endswith(forced) for event in events("given groups"))
    assert any("torch.int32" in event for event in events("loss per token"))
    last = calls(ranks, "collection between batches", "megatron", "losses")[-1]
    assert [set(call[1]) for call in last] == [{"lm loss", "alias"}, {"output"}, {"lm loss", "alias"}]


@pytest.mark.parametrize("name", [name for name in CASES if "given only" in name])
def test_a_communicator_without_groups_or_groups_without_one_are_refused(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for error in calls(ranks, name, "megatron", "error"):
        assert error[0].startswith(("ValueError: Invalid combination", "ValueError: Provide both"))
    argument = RELEASE.process_groups_argument
    for engine in CASES[name].engines[1:]:
        line = f"ValueError: p2p_communicator and {argument} belong together: give both or neither"
        assert calls(ranks, name, engine, "error") == [[line]] * WORLD


@pytest.mark.parametrize("name", marked(PARTLY, LONG))
def test_of_those_that_bpipe_evicts_some_recompute_and_some_do_not(ranks: list[dict[str, Any]], name: str) -> None:
    (stages, chunks, _), call = CASES[name].layout, CASES[name].calls[0]
    programs = Programs(choose("interleaved" if chunks > 1 else "1f1b"), bpipe=True)
    actions = programs(Size(stages, call.micro_batches, chunks)).schedule.actions[0]
    evicted = {f"F{one.unit.chunk}.{one.unit.micro_batch}" for one in actions if one.kind == EVICT}
    events = calls(ranks, name, "bpipe", "events")[0][0]
    told = {before for before, event in pairwise(events) if event in evicted}
    assert told == {"recomputes True", "recomputes False"}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.timers])
def test_no_timer_is_left_running(ranks: list[dict[str, Any]], name: str) -> None:
    """Megatron's timers refuse to start while they run, and to stop while they do not."""
    for engine in CASES[name].engines:
        for rank in ranks:
            timers = rank["cases"][name][engine]["timers"]
            assert [timers[name] for name in TIMED] == [{"running": False, "used": True}] * len(TIMED)
            assert not any(timer["running"] for timer in timers.values())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.timers])
def test_waits_for_neighbours_are_timed_by_megatrons_names(ranks: list[dict[str, Any]], name: str) -> None:
    """`--timing-log-level 2` has them in the log; the first stage has none of what comes from before and goes there."""
    last = CASES[name].layout.stages - 1
    for engine in CASES[name].engines[1:]:
        for stage, rank in enumerate(ranks):
            timers = rank["cases"][name][engine]["timers"]
            assert {name for name in WAITS if timers[name]["used"]} == {
                *(["forward-recv", "backward-send"] if stage > 0 else []),
                *(["forward-send", "backward-recv"] if stage < last else []),
            }


@pytest.mark.parametrize("layout", BOUND)
def test_both_bindings_are_replaced_only_for_pipelines_and_only_under_the_patch(
    ranks: list[dict[str, Any]], layout: str
) -> None:
    inside = STOCK[layout] if layout == "PP1" else "PipelineSchedule"
    for rank in ranks:
        assert rank["bindings"][layout] == {"inside": [inside] * 2, "outside": [STOCK[layout]] * 2}


def test_a_schedule_function_belongs_to_one_model() -> None:
    """Its links, pool and excluded parameters are those of the model that it trained first."""
    from evenpipe.megatron.schedule import PipelineSchedule

    schedule = PipelineSchedule("1f1b")
    schedule._model = [torch.nn.Linear(2, 2)]
    for other in ([torch.nn.Linear(2, 2)], [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]):
        with pytest.raises(ValueError, match="belongs to another model"):
            schedule._executor(None, SimpleNamespace(model=other))  # type: ignore[arg-type]
