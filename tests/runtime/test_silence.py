"""A wait that no heartbeat is told of names the rank that is silent, and what the job's timeout is set with."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from evenpipe.runtime.heartbeat import Beat, SilentPeer, hearing, how_to_raise, silent_peer

SECONDS = 60.0
NOW, LONG_AGO = 0.0, -100.0
TIMED_OUT = RuntimeError("Timed out waiting 60000ms for recv operation to complete")


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefixStore]:
    """The store of a job of one rank, which takes it for one of four, where others may be said to have beaten."""
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=SECONDS))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    yield PrefixStore("evenpipe/heartbeat/", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()


def told(store: PrefixStore, *ages: float) -> None:
    for rank, age in enumerate(ages):
        Beat(time.time() + age, stage=rank).tell(store, rank)


def waiting_for(ranks: list[int]) -> str:
    with pytest.raises(SilentPeer) as error, hearing(ranks, "figures of all"):
        raise TIMED_OUT
    return str(error.value)


def test_of_those_that_all_wait_for_the_silent_one_is_named(beats: PrefixStore) -> None:
    told(beats, NOW, NOW, LONG_AGO)
    line = waiting_for([0, 1, 2])
    assert line.startswith("rank 2 (stage 2) has given no sign of life for 100 s: rank 0 (stage 0) waited 60 s for ")
    assert line.endswith(f"raise the timeout ({how_to_raise()})")


def test_ranks_that_all_live_are_not_listed_where_they_are_many(beats: PrefixStore) -> None:
    told(beats, NOW, NOW, NOW, NOW)
    assert waiting_for([0, 1, 2, 3]).startswith("all of the 3 other ranks live, and one of them does not get there: ")
    assert waiting_for([0, 1]).startswith("rank 1 (stage 1) sends nothing, though its process lives ")


def test_without_beats_and_for_another_error_nothing_is_replaced(beats: PrefixStore) -> None:
    with pytest.raises(RuntimeError, match="Timed out"), hearing([0, 1], "it"):
        raise TIMED_OUT
    told(beats, NOW, LONG_AGO)
    with pytest.raises(RuntimeError, match="closed by peer"), hearing([0, 1], "it"):
        raise RuntimeError("Connection closed by peer")


def test_an_error_that_nobody_caught_names_who_is_silent_if_anybody_is(beats: PrefixStore) -> None:
    told(beats, NOW, NOW, NOW)
    assert silent_peer(TIMED_OUT) is None
    told(beats, NOW, NOW, LONG_AGO)
    assert "rank 2 (stage 2) has given no sign of life for 100 s: rank 0 " in str(silent_peer(TIMED_OUT))
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
