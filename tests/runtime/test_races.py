"""What moves data has no race, on a device with streams as the rig has one; and code that drops an order has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evenpipe.schedule import GAINING, Size, Swaps, own
from evenpipe.schedule import build as build_program
from tests.reports import reports
from tests.runtime.executor_cases import ROWS, WIDTH

SCRIPT = Path(__file__).with_name("race_cases.py")
WORLD = 4


#: Of each schedule: model chunks, the group size, and whether BPipe has anything to level.
SCHEDULES = {
    "gpipe": (1, 1, False),
    "1f1b": (1, 1, True),
    "kfkb": (1, 2, True),
    "interleaved": (2, 1, True),
    "interleaved-zb": (2, 1, False),
    "zb-h1": (1, 1, False),
    "zb-h2": (1, 1, False),
    "v-half": (2, 1, False),
    "v-min": (2, 1, False),
    "zbv": (2, 1, False),
    "dualpipev": (2, 1, False),
}


def case(
    kind: str, name: str, swaps: Swaps | bool = False, bpipe: bool = True, micro_batches: int = 4, **others: Any
) -> Any:
    """A case of a small model under a schedule, with BPipe where it has anything to level."""
    chunks, group_size, levels = SCHEDULES[name]
    size = Size(WORLD, micro_batches, chunks, group_size)
    program = build_program(name, size, bpipe and levels, swaps=range(WORLD) if swaps is True else swaps or ())
    return {"kind": kind, "schedule": str(program.schedule), **others}


CASES: dict[str, dict[str, Any]] = {
    **{name: case("executor", name, model="dense") for name in SCHEDULES},
    **{f"{name} swap": case("keeper", name, swaps=True, way="early") for name in SCHEDULES},
    **{f"{name} swap a share": case("executor", name, swaps=GAINING, model="wide", swap=0.9) for name in SCHEDULES},
    "1f1b without bpipe": case("executor", "1f1b", bpipe=False, model="dense"),
    "its output is saved": case("executor", "1f1b", model="saving its output"),
    "routed": case("executor", "1f1b", model="routed"),
    "cast": case("executor", "1f1b", model="cast"),
    "beside": case("executor", "1f1b", model="beside"),
    "beside without bpipe": case("executor", "1f1b", bpipe=False, model="beside"),
    "wide": case("executor", "1f1b", micro_batches=6, model="wide", measure=[False, True], rows=[8, 8]),
    "computed again": case("keeper", "1f1b", swaps=True, way="kept"),
    "2bw bpipe": {"kind": "stream", "name": "p=4 m=5 bpipe, broken off"},
    "2bw bpipe swap": {"kind": "stream", "name": "p=4 m=5 bpipe, broken off", "swaps": True},
    "exchange": {"kind": "exchange"},
    "swap": {"kind": "swap"},
    "blocks": {"kind": "blocks"},
    "back": {"kind": "back"},
    "following": {"kind": "following"},
    "shared": {"kind": "shared"},
    # The one left out asks gloo's own groups how long they wait.
    "channels": {"kind": "channels", "without": ["links_wait_as_long_as_the_job_has_ranks_wait"]},
}

#: Code that has one order less, by the case in which it shows and the module: what becomes of which words.
MUTANTS: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("following", "channel"): {
        "a wait for a message is dropped": ("            work.wait()\n", "            pass\n"),
        "a load does not wait for what leaves": (
            "                transfer.hold_up_stream()\n",
            "                pass\n",
        ),
        "what leaves is let go of when a load waits for it": (
            "                transfer.hold_up_stream()\n",
            "                transfer.finish()\n",
        ),
        "a load does not wait for compute": ("self.side.wait_stream(streams.current(self.device))", "pass"),
        "the wrong stream waits for compute": (
            "self.side.wait_stream(streams.current(self.device))",
            "streams.current(self.device).wait_stream(self.side)",
        ),
        "a message's memory is let go of when it has started": (
            "[self._group._end_coalescing()], tensors)",
            "[self._group._end_coalescing()], ())",
        ),
        "a message is through before it has started": (
            """        for tensor in tensors:
            operation([tensor], peer, 0)
        return Transfer([self._group._end_coalescing()], tensors)""",
            """        through = self._group._end_coalescing()
        for tensor in tensors:
            operation([tensor], peer, 0)
        return Transfer([through], tensors)""",
        ),
    },
    ("wide", "flow"): {
        "`after` is dropped": (".receive(buffers, after)", ".receive(buffers)"),
        "a message is taken before it is through": ("transfer.wait()\n            return", "return"),
        "a load is unpacked before it is through": ("self.wait(transfer)\n        for", "for"),
        "a load is unpacked before it is through, where nothing is measured": (
            "        else:\n            transfer.wait()",
            "        else:\n            pass",
        ),
    },
    ("swap", "host_memory"): {
        "a copy does not wait for compute": ("stream.wait_stream(streams.current(self._device))", "pass"),
        "a copy is through before it has started": (
            """            target.copy_(source, non_blocking=True)
            event = stream.record_event()""",
            """            event = stream.record_event()
            target.copy_(source, non_blocking=True)""",
        ),
        "a copy's event is another stream's": (
            "event = stream.record_event()",
            "event = (self._out if stream is self._back else self._back).record_event()",
        ),
        "the wrong stream waits for a copy": (
            "streams.current(self._device).wait_event(event)",
            "stream.wait_event(event)",
        ),
    },
    ("blocks", "host_memory"): {
        "a block of pinned memory is lent while it is read": (
            "            self._out.wait_event(block.through)\n",
            "            pass\n",
        ),
        "a block of pinned memory is lent with the event before": (
            "block.through = event",
            "block.through = block.through or event",
        ),
    },
    ("back", "host_memory"): {
        "a copy back does not wait for the copy out": ("        self._back.wait_event(host.through)\n", ""),
    },
    ("swap", "recompute_swap"): {
        "memory is free before it has been copied out": ("            self._leaving.wait()\n", ""),
        "memory is free while it is copied out": (
            "self._arriving, self._leaving, self._read):",
            "self._arriving, self._read):",
        ),
        "memory is free while it is copied into": (
            "self._arriving, self._leaving, self._read):",
            "self._leaving, self._read):",
        ),
        "memory that stays is free while it is read": ("self._leaving, self._read):", "self._leaving):"),
        "what comes back is used before it is here": ("            self._arriving.wait()\n", ""),
    },
    ("1f1b swap a share", "host_swaps"): {
        "a share is free while it is copied out": (
            "        for passage in passages:\n            self._wait(passage)\n        self._store.release",
            "        self._store.release",
        ),
        "a share is used before it is back": (
            "            self._wait(passage)\n        self._store.unpack",
            "            pass\n        self._store.unpack",
        ),
    },
    ("beside", "store"): {
        "what a layer's own stream saves is moved": ("saved.aside = True", "pass"),
    },
    ("exchange", "exchange"): {
        "rows are let go of while they are gathered": ("work, (given, mine), ", "work, (), "),
        "rows are read before they are gathered": ("work.wait()\n                gathered", "gathered"),
        "the wrong stream waits for rows": (
            "            with streams.on(self._stream):\n                work.wait()\n",
            "            work.wait()\n            with streams.on(self._stream):\n",
        ),
    },
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Per case, and per mutant, what each rank found."""
    folder = tmp_path_factory.mktemp("races")
    mutants = {
        name: {**CASES[case], "mutant": (f"evenpipe.runtime.{module}", *words)}
        for (case, module), changes in MUTANTS.items()
        for name, words in changes.items()
    }
    (folder / "cases.json").write_text(json.dumps({**CASES, **mutants}))
    ranks = reports(SCRIPT, folder, WORLD)
    return {name: [rank[name] for rank in ranks] for name in (*CASES, *mutants)}


def test_every_schedule_has_a_case() -> None:
    """Those that flush have one of `SCHEDULES`; 2bw has cases of its own, and paci moves what 2bw moves.

    Its steps write weights on the stream that computes with them.
    """
    assert {*SCHEDULES, "2bw", "paci"} == set(own())


@pytest.mark.parametrize("name", CASES)
def test_every_access_is_ordered(ran: dict[str, list[dict[str, Any]]], name: str) -> None:
    for rank in ran[name]:
        assert "error" not in rank, rank["error"]
        assert rank["races"] == []
        assert "nan" not in json.dumps(rank["found"]).lower()


@pytest.mark.parametrize("name", [name for changes in MUTANTS.values() for name in changes])
def test_code_without_an_order_is_reported(ran: dict[str, list[dict[str, Any]]], name: str) -> None:
    assert any(rank["races"] for rank in ran[name]), ran[name]


def test_what_a_layers_own_stream_saves_stays_and_its_bytes_are_said(ran: dict[str, list[dict[str, Any]]]) -> None:
    """Of the stage that evicts: GELU's argument and result, and the input, which both streams save."""
    saved = 3 * ROWS * WIDTH * 4
    said = [[batch["remarks"] for batch in rank["found"]] for rank in ran["beside"]]
    line = (
        f"stage 0 keeps what layers save on streams of their own, up to {saved:,} bytes of a micro-batch, and evicts "
        "the rest"
    )
    assert said == [[[line]], [[]], [[]], [[]]]


def test_streams_that_are_dealt_twice_are_said(ran: dict[str, list[dict[str, Any]]]) -> None:
    for number, rank in enumerate(ran["shared"]):
        before, said = rank["found"]
        assert before == ""
        assert said.startswith(f"evenpipe: rank {number}: streams: ")
        assert "swaps to the host and swaps to the host, 15; " in said
        assert " and figures of ranks" in said
        assert said.count("evenpipe: ") == 3  # once for each call that has found one more
        assert "share one cudaStream" in said


@pytest.mark.parametrize("name", ["1f1b", "beside"])
def test_bytes_that_arrive_when_they_are_waited_for_are_those_that_were_sent(ran: Any, name: str) -> None:
    for leveled, plain in zip(ran[name], ran[f"{name} without bpipe"], strict=True):
        for ours, theirs in zip(leveled["found"], plain["found"], strict=True):
            assert (ours["losses"], ours["gradients"]) == (theirs["losses"], theirs["gradients"])
