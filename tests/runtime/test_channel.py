"""Channels between four real gloo processes: order, ownership of what is under way, opening, closing, refusals."""

import gc
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from evenpipe.runtime import connections
from evenpipe.runtime.channel import Channel, unrecorded
from evenpipe.runtime.connections import open_channels
from tests.reports import reports

sys.path.insert(0, str(Path(__file__).parent))
from channel_cases import CASES

SCRIPT = Path(__file__).with_name("channel_cases.py")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """For each rank, what became of each case."""
    folder = tmp_path_factory.mktemp("channels")
    return reports(SCRIPT, folder, 4)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_channels(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok"] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn])
def test_what_is_moved_are_the_same_bytes_in_a_storage_that_is_not_the_allocators(dtype: torch.dtype) -> None:
    tensor = torch.empty(3, 5, dtype=dtype)
    memory = StorageWeakRef(tensor.untyped_storage())
    alias = unrecorded(tensor)
    assert (alias.dtype, alias.shape) == (torch.uint8, (15 * dtype.itemsize,))
    assert alias.data_ptr() == tensor.data_ptr()
    assert alias.untyped_storage()._cdata != tensor.untyped_storage()._cdata
    del tensor
    assert not memory.expired()
    del alias
    assert memory.expired()


class NotedGroup:
    """Notes how it is ended; of its messages none comes."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def rank(self) -> int:
        return 0

    def send(self, *message: object) -> "NotedGroup":
        return self

    def wait(self) -> None:
        raise RuntimeError("Timed out waiting 1800000ms for send operation to complete")

    def shutdown(self) -> None:
        self.ended.append("shutdown")

    def abort(self) -> None:
        self.ended.append("abort")


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize(
    ("before", "ended"), [((), "shutdown"), (("give_up",), "abort"), (("give_up", "give_up"), "abort")]
)
def test_a_group_is_shut_down_or_aborted_if_it_was_given_up(closed: bool, before: tuple[str, ...], ended: str) -> None:
    """At its close, or else with its end; and once."""
    group = NotedGroup()
    channel = Channel(0, 1, group, "cpu")
    for call in before:
        getattr(channel, call)()
    assert group.ended == []
    if closed:
        channel.close()
        assert group.ended == [ended]
        channel.give_up()
    del channel
    gc.collect()
    assert group.ended == [ended]


def test_a_group_is_aborted_where_an_error_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    group = NotedGroup()
    monkeypatch.setattr(sys, "last_value", ArithmeticError(), raising=False)
    Channel(0, 1, group, "cpu").close()
    assert group.ended == ["abort"]


def test_a_link_whose_first_message_never_comes_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by who catches the error and goes on."""
    group = NotedGroup()
    monkeypatch.setattr(connections, "_open_group", lambda *link: group)
    monkeypatch.setattr(connections.dist, "get_rank", lambda: 0)
    with pytest.raises(RuntimeError, match="Timed out"):
        open_channels([("forward", 0, 1)], "gloo", "cpu", timedelta(seconds=1))
    gc.collect()
    assert group.ended == ["abort"]
