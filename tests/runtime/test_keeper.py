"""Stages that recompute and swap: the same gradients, less memory of the device, and memory of the host for swaps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.runtime import processes, streams
from evenpipe.runtime.host_memory import HostLink, HostMemory, check_hosts
from evenpipe.runtime.recompute_swap import Keeper, Keeping, KeepingCaller
from evenpipe.runtime.store import ActivationStore
from evenpipe.schedule import Size, build, swapped_at_once
from tests.reports import reports
from tests.runtime.keeper_cases import NBYTES, WORLD

SCRIPT = Path(__file__).with_name("keeper_cases.py")
NAMES = {"1f1b": ("1f1b", False), "1f1b bpipe": ("1f1b", True), "gpipe": ("gpipe", False), "zb-h1": ("zb-h1", False)}
M = 6


def program(name: str, bpipe: bool, swaps: bool):
    return build(name, Size(WORLD, M), bpipe, swaps=range(WORLD) if swaps else ())


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("keeper")
    cases = {
        f"{case} {way}": {"schedule": str(program(*of, way != "all").schedule), "way": way, "gbps": gbps}
        for case, of in NAMES.items()
        for way, gbps in (("all", 0.0), ("kept", 0.0), ("early", 0.01))
    }
    (folder / "cases.json").write_text(json.dumps(cases))
    ranks = reports(SCRIPT, folder, WORLD)
    return {name: [rank[name] for rank in ranks] for name in cases}


@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("way", ["kept", "early"])
def test_gradients_are_those_without(ran, case, way) -> None:
    for plain, kept in zip(ran[f"{case} all"], ran[f"{case} {way}"], strict=True):
        assert "error" not in kept, kept["error"]
        assert kept["gradients"] == plain["gradients"]


@pytest.mark.parametrize("case", [case for case in NAMES if case != "zb-h1"])  # whose second halves hold all till later
def test_what_micro_batches_hold_falls_by_what_they_do_not_keep(ran, case) -> None:
    """Of four tensors two, and the loss saves one more; what comes back is needed for one micro-batch at a time."""
    live = program(*NAMES[case], False).schedule.peak_live
    for stage, (plain, kept) in enumerate(zip(ran[f"{case} all"], ran[f"{case} kept"], strict=True)):
        assert plain["peak"] - kept["peak"] >= (2 * live[stage] - 2) * NBYTES
        assert kept["peak"] < plain["peak"] or live[stage] == 1


@pytest.mark.parametrize("case", NAMES)
def test_what_is_on_the_host_fits_into_what_was_reserved_for_it(ran, case) -> None:
    """Of one swapped tensor a micro-batch, whatever else keeps micro-batches apart: BPipe, split backwards."""
    between = {"1f1b": (4, 3, 2, 1), "1f1b bpipe": (4, 3, 2, 1), "gpipe": (M,) * 4, "zb-h1": (4, 4, 4, 4)}
    for count, kept in zip(between[case], ran[f"{case} kept"], strict=True):
        assert kept["host"] == [count * NBYTES, count * NBYTES]


aten = torch.ops.aten


def kept(nodes: int, nbytes: int) -> tuple[ActivationStore, Keeper, Keeping]:
    """Of so many nodes, each of which makes one storage, all are computed again."""
    store = ActivationStore()
    every = frozenset(range(nodes))
    return store, Keeper(store, torch.device("cpu")), Keeping(every, every, made={n: ((n, nbytes),) for n in every})


def chained(keep: KeepingCaller, hidden: Tensor, nodes: int) -> Tensor:
    for node in range(nodes):
        hidden = keep(node, aten.tanh.default, hidden)
    return hidden


def test_a_chain_longer_than_pythons_stack_runs_again() -> None:
    nodes, start = 400, torch.randn(16, dtype=torch.float64, requires_grad=True)
    store, keeper, keeping = kept(nodes, start.nbytes)
    with store.recording(0), keeper.forward(0, keeping, lambda ordinal: nullcontext()) as keep:
        last = chained(keep, start, nodes)
    assert store.nbytes(0) <= start.nbytes
    last.sum().backward()
    plain = start.detach().clone().requires_grad_()
    hidden = plain
    for _ in range(nodes):
        hidden = hidden.tanh()
    hidden.sum().backward()
    assert start.grad is not None
    assert torch.equal(start.grad, plain.grad)


def test_a_conjugate_view_of_what_is_computed_again_is_refused() -> None:
    start = torch.randn(16, dtype=torch.complex64, requires_grad=True)
    store, keeper, keeping = kept(1, start.nbytes)
    with store.recording(0), keeper.forward(0, keeping, lambda ordinal: nullcontext()) as keep:
        made = chained(keep, start, 1)
        with pytest.raises(RuntimeError, match="a conjugate or negative view"):
            made * made.conj()


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


def test_sizes_that_vary_by_less_than_an_eighth_share_blocks(pieces: list[int]) -> None:
    """As experts' messages do, whose sizes depend on what a router sends them."""
    memory = HostMemory(HOST)
    for nbytes in range(15_400, 16_385):
        assert memory.lend(nbytes).memory.numel() == 16_384
    assert pieces == [16_384]


def test_a_host_without_enough_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenpipe.runtime.host_memory.free_bytes", lambda: 2**20)
    with pytest.raises(ValueError, match=r"^swaps: 0\.02 GiB more .* which has 0\.00 GiB free: swap a smaller share"):
        HostMemory(HOST).lend(2**24)


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
