"""Signs of life in a store, and the name of the rank that others wait for in vain."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as Unanswered
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

import evenpipe
from evenpipe.runtime import heartbeat
from evenpipe.runtime.heartbeat import (
    Beat,
    Heartbeat,
    SilentPeer,
    _beat,
    _Life,
    answered,
    apart,
    beats_of,
    hearing,
    how_to_raise,
    silent_peer,
)

BEAT = 0.02  # seconds


class Counting:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self.store, self.requests = HashStore(), 0

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return self.store.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests += 1
        return self.store.multi_get(keys)


@pytest.mark.parametrize(("missing", "requests"), [((), 2), ((700,), 30), ((3, 700), 50)])
def test_the_beats_of_a_thousand_ranks_take_few_round_trips(missing: tuple[int, ...], requests: int) -> None:
    """Hundreds of ranks ask at once, when waits time out."""
    store = Counting()
    beats = {rank: Beat(float(rank), rank + 1) for rank in range(1024) if rank not in missing}
    for rank, beat in beats.items():
        beat.write(store, rank)
    assert beats_of(store, range(1024)) == beats
    assert store.requests <= requests


def tcp(folder: Path) -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("inner", [tcp, lambda folder: FileStore(str(folder / "store"), 1), lambda folder: HashStore()])
def test_a_connection_apart_is_not_held_up_by_a_wait(inner: Callable[[Path], dist.Store], tmp_path: Path) -> None:
    store = PrefixStore("a/", PrefixStore("b/", inner(tmp_path)))
    own = apart(store)
    assert own is not None
    waiting = threading.Thread(target=store.wait, args=(["come"], timedelta(seconds=30)), daemon=True)
    waiting.start()
    time.sleep(0.2)
    answered(lambda: own.set("come", "now"))
    waiting.join(10)
    assert store.get("come") == b"now"


def test_what_cannot_be_cloned_has_none_apart() -> None:
    class Own(dist.Store):
        pass

    assert apart(object()) is apart(Own()) is None  # type: ignore[arg-type]


def test_an_answer_is_not_waited_for_for_ever() -> None:
    with pytest.raises(Unanswered):
        answered(threading.Event().wait, 0.1)
    with pytest.raises(ArithmeticError):
        answered(lambda: 1 // 0)


def lived(store: dist.Store, life: _Life, seconds: float = 10 * BEAT) -> None:
    """Rank 0 beats for so long, and ends."""
    thread = threading.Thread(target=_beat, args=(store, 0, life, BEAT), daemon=True)
    thread.start()
    time.sleep(seconds)
    life.ended.set()
    thread.join(10)
    assert not thread.is_alive()


def test_who_ends_well_says_so() -> None:
    store = HashStore()
    lived(store, _Life(awaited=3))
    assert beats_of(store, [0])[0]._replace(at=0.0) == Beat(0.0, closed=True)


@pytest.mark.parametrize("how", ["given up", "by an error"])
def test_who_fails_is_missed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "by an error":
        monkeypatch.setattr(sys, "last_value", ArithmeticError(), raising=False)
    store = HashStore()
    lived(store, _Life(awaited=3, failed=how == "given up"))
    assert beats_of(store, [0])[0]._replace(at=0.0) == Beat(0.0, 3)


def test_of_those_watched_the_silent_is_told_of_once_and_who_has_closed_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, long_ago = HashStore(), time.time() - 100
    Beat(long_ago).write(store, 1)
    Beat(long_ago, closed=True).write(store, 2)
    Beat(time.time() + 100).write(store, 3)
    lived(store, _Life(watched={rank: f"rank {rank}" for rank in (1, 2, 3, 4)}))
    assert capsys.readouterr().err.count("\n") == 1
    lived(store, _Life(watched={1: "rank 1"}))
    assert re.match(r"evenpipe: rank 1 has given no sign of life for 10\d s: look after", capsys.readouterr().err)


def test_a_closed_standard_error_does_not_end_the_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    store = HashStore()
    Beat(0.0).write(store, 1)
    lived(store, _Life(watched={1: "rank 1"}))
    assert beats_of(store, [0])[0].closed


class Failing(Counting):
    """Has ended, or stands still."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def check(self, keys: list[str]) -> bool:
        if self.how == "ended":
            raise RuntimeError("Broken pipe")
        raise Unanswered


@pytest.mark.parametrize("how", ["ended", "stands still"])
def test_a_store_that_fails_is_told_of_once_while_somebody_is_watched(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that only stands still may go on; then others look for this rank's beats again."""
    monkeypatch.setattr(heartbeat.dist, "is_initialized", lambda: True)
    store = Failing(how)
    lived(store, _Life(watched={1: "rank 1"}), 50 * BEAT)
    assert capsys.readouterr().err == (
        "evenpipe: the host on which the ranks met does not answer; one that is silent will not be named\n"
    )
    assert beats_of(store.store, [0])[0].closed == (how == "stands still")
    ended = _Life(watched={1: "rank 1"})
    ended.ended.set()
    lived(Failing(how), ended)
    lived(Failing(how), _Life())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(heartbeat.dist, "is_initialized", lambda: False)
    lived(Failing(how), _Life(watched={1: "rank 1"}))
    assert capsys.readouterr().err == ""


NOW, LONG_AGO = 0.0, -100.0


@pytest.mark.parametrize(
    ("beats", "missing", "named"),
    [
        # Of ranks 0 to 3, which are a pipeline, rank 0 asks.
        (
            {0: (NOW, 1), 1: (NOW, 2), 2: (LONG_AGO, 3), 3: (NOW, 2)},
            [1],
            r"rank 2 \(stage 2\) has given no .*",
        ),
        ({0: (NOW, 1), 1: (NOW, 2), 3: (NOW, 2)}, [1], r"rank 2 \(stage 2\) has not opened its links"),
        ({0: (NOW, None), 1: (NOW, 2), 3: (NOW, 2)}, [1, 2, 3], r"rank 2 \(stage 2\) has not opened its links"),
        (
            {0: (NOW, None), 1: (NOW, 2)},
            [1, 2, 3],
            r"rank 2 .* has not opened its links and rank 3 .* its links",
        ),
        ({0: (NOW, 1), 1: (NOW, None), 7: (LONG_AGO, None), 8: (LONG_AGO, 7)}, [1], r"rank 7 has given no sign .*"),
        ({0: (NOW, 1), 1: (NOW, None), 7: (LONG_AGO, None, True)}, [1], r"rank 1 \(stage 1\) sends nothing, though .*"),
        ({0: (NOW, 1), 1: (NOW, 0)}, [1], r"rank 1 \(stage 1\) sends nothing, though its process lives .*"),
        ({0: (NOW, 1), 1: (LONG_AGO, None, True)}, [1], r"rank 1 \(stage 1\) has closed its links"),
    ],
)
def test_who_is_named_where_waits_have_timed_out(
    beats: dict[int, tuple[float, int | None]], missing: list[int], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is missing but waits for others itself is not to blame; nor is who has closed its links elsewhere."""
    store = HashStore()
    monkeypatch.setattr(heartbeat, "_get_default_store", lambda: store)
    monkeypatch.setattr(heartbeat, "apart", lambda store: None)
    monkeypatch.setattr(heartbeat.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(heartbeat.dist, "get_world_size", lambda: 9)
    for rank, (ago, *others) in beats.items():
        Beat(time.time() + ago, *others).write(PrefixStore("evenpipe/heartbeat/", store), rank)
    asking = Heartbeat(range(4), timedelta(minutes=1))
    line = rf"^{named}: rank 0 \(stage 0\) waited 60 s for it: look after "
    with pytest.raises(SilentPeer, match=line), asking.naming(lambda: missing, "it"):
        raise Unanswered


def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the process that keeps it stands still, or has ended."""
    monkeypatch.setattr(heartbeat, "_get_default_store", HashStore)
    monkeypatch.setattr(heartbeat.dist, "get_rank", lambda: 0)

    def missing() -> list[int]:
        raise RuntimeError("Connection reset by peer")

    line = r"^the host on which the ranks met does not answer: rank 0 .* waited 60 s for it"
    asking = Heartbeat(range(4), timedelta(minutes=1))
    with pytest.raises(SilentPeer, match=line), asking.naming(missing, "it"):
        raise RuntimeError("wait timeout after 60000ms")


TIMEOUT_SECONDS = 60.0
TIMED_OUT = RuntimeError("Timed out waiting 60000ms for recv operation to complete")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefixStore]:
    """The store of a job of one rank, which takes it for one of four, where others may be said to have beaten."""
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=TIMEOUT_SECONDS))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    yield PrefixStore("evenpipe/heartbeat/", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()


def told(store: PrefixStore, *ages: float) -> None:
    for rank, age in enumerate(ages):
        Beat(time.time() + age, stage=rank).write(store, rank)


def waiting_for(ranks: list[int]) -> str:
    with pytest.raises(SilentPeer) as error, hearing(ranks, "figures of all"):
        raise TIMED_OUT
    return str(error.value)


def test_of_those_that_all_wait_for_the_silent_one_is_named(job: PrefixStore) -> None:
    told(job, NOW, NOW, LONG_AGO)
    line = waiting_for([0, 1, 2])
    # A busy machine takes a second from one to the other.
    assert re.match(
        r"rank 2 \(stage 2\) has given no sign of life for 10\d s: rank 0 \(stage 0\) waited 60 s for ", line
    )
    assert line.endswith(f"raise the timeout ({how_to_raise()})")


def test_ranks_that_all_live_are_not_listed_where_they_are_many(job: PrefixStore) -> None:
    told(job, NOW, NOW, NOW, NOW)
    assert waiting_for([0, 1, 2, 3]).startswith("all of the 3 other ranks live, and one of them does not get there: ")
    assert waiting_for([0, 1]).startswith("rank 1 (stage 1) sends nothing, though its process lives ")


def test_without_beats_and_for_another_error_nothing_is_replaced(job: PrefixStore) -> None:
    with pytest.raises(RuntimeError, match="Timed out"), hearing([0, 1], "it"):
        raise TIMED_OUT
    told(job, NOW, LONG_AGO)
    with pytest.raises(RuntimeError, match="closed by peer"), hearing([0, 1], "it"):
        raise RuntimeError("Connection closed by peer")


def test_an_error_that_nobody_caught_names_who_is_silent_if_anybody_is(job: PrefixStore) -> None:
    told(job, NOW, NOW, NOW)
    assert silent_peer(TIMED_OUT) is None
    told(job, NOW, NOW, LONG_AGO)
    assert re.search(r"rank 2 \(stage 2\) has given no sign of life for 10\d s: rank 0 ", str(silent_peer(TIMED_OUT)))
    assert silent_peer(ValueError("timed out")) is None
    assert silent_peer(RuntimeError("closed by peer")) is None


@pytest.mark.parametrize(
    ("module", "how"),
    [
        ("evenpipe.train.process", "--timeout-minutes"),
        ("megatron.training", "--distributed-timeout-minutes"),
        ("deepspeed", "deepspeed.init_distributed(timeout=...)"),
        (None, "torch.distributed.init_process_group(timeout=...)"),
    ],
)
def test_the_remedy_is_of_what_has_set_the_timeout(
    module: str | None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("evenpipe.train.process", "megatron.training", "deepspeed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if module is not None:
        monkeypatch.setitem(sys.modules, module, sys)
    assert how_to_raise() == how


def test_every_new_group_is_given_a_timeout() -> None:
    """Without one it has torch's default, whatever the job's own groups have."""
    calls = [
        (path.name, call)
        for path in Path(evenpipe.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "new_group"
    ]
    assert calls
    assert [name for name, call in calls if "timeout" not in [keyword.arg for keyword in call.keywords]] == []


SCRIPT = Path(__file__).with_name("silent_cases.py")
SECONDS = 12.0  # of which a rank that lives may be quiet for a quarter, on a busy machine
NO_SIGN = r"rank 2 \(stage 2\) has given no sign of life for \d+ s"
NOT_OPENED = r"rank 2 \(stage 2\) has not opened its links"
SAID = {
    ("watched", "bpipe"): NO_SIGN,
    ("amid", "bpipe"): NO_SIGN,
    ("amid", "plain"): NO_SIGN,
    ("before", "bpipe"): NOT_OPENED,
    ("before", "plain"): NOT_OPENED,
    ("opening", "bpipe"): NO_SIGN,
    ("opening", "plain"): NO_SIGN,
    ("figures", "plain"): NO_SIGN,
    ("barrier", "plain"): NO_SIGN,
    # Nobody beats there while links are opened: rank 0, which has its own, knows no more of the others.
    ("one connection", "plain"): rf"(rank [13] \(stage [13]\) has not opened its links|{NOT_OPENED}| and )+",
}


IN_THE_GATE = [("watched", "bpipe"), ("figures", "plain")]
assert {*IN_THE_GATE} <= {*SAID}
CASES = [pytest.param(*one, marks=pytest.mark.gate if one in IN_THE_GATE else pytest.mark.long) for one in SAID]


@pytest.mark.skipif(sys.platform != "linux", reason="SIGSTOP, and fork")
@pytest.mark.parametrize(("case", "shape"), CASES)
def test_a_silent_rank_is_named_by_all_that_wait(case: str, shape: str, tmp_path: Path) -> None:
    """Its neighbours wait for it, and the others for them; all began to at about the same time."""
    run = subprocess.run([sys.executable, SCRIPT, tmp_path, case, shape], timeout=800, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert set(outcome) == {"0", "1", "3"}
    # The rest is for processes to end, on a busy machine.
    assert min(seconds for seconds, _ in outcome.values()) < 3 * SECONDS
    named = 0
    for rank, (_, said) in outcome.items():
        line = (
            rf"evenpipe: error: {SAID[case, shape]}: rank {rank} \(stage {rank}\) waited {SECONDS:g} s for "
            r"(link \w+ \d -> \d|what devices of the pipeline are like|figures of all|other ranks): look after .* "
            r"\(torch\.distributed\.init_process_group\(timeout=\.\.\.\)\)"
        )
        # Whoever has lost a peer that ended for this reason says that.
        errors = re.findall(r"^(?:\[rank\d\]: ?)?(evenpipe: error: .*)", said, re.M)
        assert all("rank 2" in error and re.fullmatch(line, error) for error in errors), errors
        named += len(errors)
        told = re.findall(r"^evenpipe: rank 2 .* for (?:9|10|11|12) s: look", said, re.M)
        assert len(told) == (case == "watched" and rank in "13"), said
    assert named
