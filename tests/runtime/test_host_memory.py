"""Memory of the host for swaps: one piece, no larger than it has to be, lent again only after the last copy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from evenpipe.runtime import processes, streams
from evenpipe.runtime.host_memory import HostLink, HostMemory, check_hosts
from evenpipe.schedule import Size, build, swapped_at_once

HOST = torch.device("cpu")


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that are pinned."""
    found, pinned = list[int](), streams.pinned

    def noted(device: torch.device, nbytes: int) -> torch.Tensor:
        found.append(nbytes)
        return pinned(device, nbytes)

    monkeypatch.setattr(streams, "pinned", noted)
    return found


def test_blocks_lie_in_one_piece_which_is_rounded_up_by_a_line_of_cache_only(pieces: list[int]) -> None:
    memory = HostMemory(HOST)
    memory.reserve([1000, 3, 1000, 5000])
    blocks = [memory.lend(nbytes) for nbytes in (1000, 5000, 1000, 3)]
    assert [block.memory.numel() for block in blocks] == [1000, 5000, 1000, 3]
    assert pieces == [memory.nbytes] == [2 * 1024 + 64 + 5056]
    spans = sorted((block.memory.data_ptr(), block.memory.numel()) for block in blocks)
    assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
    assert len({block.memory.untyped_storage().data_ptr() for block in blocks}) == 1


def test_a_block_is_lent_again_when_nobody_has_it_the_one_that_was_free_for_longest_first(pieces: list[int]) -> None:
    memory = HostMemory(HOST)
    memory.reserve([64, 64])
    one, other = memory.lend(64), memory.lend(64)
    addresses = [one.memory.data_ptr(), other.memory.data_ptr()]
    del one
    del other
    assert [memory.lend(64).memory.data_ptr() for _ in range(3)] == [*addresses, addresses[0]]
    assert pieces == [128]


def test_more_than_was_reserved_is_pinned_when_it_is_needed_and_kept(pieces: list[int]) -> None:
    memory = HostMemory(HOST)
    for _ in range(3):
        lent = [memory.lend(100), memory.lend(100)]
        del lent
    assert pieces == [128, 128]
    assert memory.nbytes == 256


def test_a_copy_out_waits_for_the_copy_back_that_still_reads_its_block() -> None:
    link, waits = HostLink(HOST), list[object]()
    link._out.wait_event = waits.append  # type: ignore[method-assign]
    first = link.out(torch.ones(64, dtype=torch.uint8)).target
    assert waits == []
    link.back(first, torch.empty(64, dtype=torch.uint8))
    read = first.through
    del first
    link.out(torch.ones(64, dtype=torch.uint8))
    assert waits == [read]


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_more_than_the_host_has_is_refused() -> None:
    check_hosts([1 << 20], None)
    with pytest.raises(ValueError, match=r"^swaps take 1,048,576\.0 GiB of memory of the host .*, which has [\d,.]+ G"):
        check_hosts([1 << 50], None)


def test_shared_memory_of_a_container_is_not_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unlike the cache of files, of which the kernel counts it as a part."""
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 200\nfile 500\nshmem 400\n")
    monkeypatch.setattr(processes, "_CGROUP", tmp_path)
    assert processes.free_bytes() == 1000 - 200 - 400


def test_as_many_units_are_on_the_host_as_are_between_forward_and_last_backward() -> None:
    """Also those that are evicted, and of each chunk its own."""
    found = [swapped_at_once(row)[0] for row in build("1f1b", Size(4, 8), bpipe=True, swaps=range(4)).schedule.actions]
    assert found == [4, 3, 2, 1]
    interleaved = build("interleaved", Size(2, 4, 2), swaps=range(4)).schedule.actions[0]
    assert swapped_at_once(interleaved) == {0: 4, 1: 2}
