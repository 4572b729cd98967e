"""A few values of every rank: brought to every rank in the background, or to rank 0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from evenpipe.runtime import streams
from evenpipe.runtime.heartbeat import job_timeout, wait_for

__all__ = ["Exchange", "JointExchange", "gather"]


class Exchange:
    """An asynchronous all-gather of one row of `columns` doubles a rank, again and again, over `group`.

    The ranks need not start at the same time: `start` never waits for another rank, `finish` waits for the last.
    """

    def __init__(self, group: dist.ProcessGroup, columns: int, device: torch.device) -> None:
        self._group = group
        self._columns = columns
        self._device = device
        self._gathering: tuple[dist.Work, tuple[Tensor, Tensor], Tensor] | None = None
        self._stream = streams.opened(device) if streams.is_asynchronous(device) else None
        # A copy from it waits for no compute. Of the row before, it has been waited for with what all ranks gave.
        self._row = streams.pinned(device, 8 * columns).view(torch.float64) if self._stream is not None else None

    @classmethod
    def among_all(cls, columns: int, device: torch.device) -> Exchange:
        """Return one for all ranks of the job, which make it at the same point."""
        world = dist.group.WORLD
        assert world is not None, "torch.distributed has been started"
        return cls(world, columns, device)

    @property
    def named(self) -> dict[str, streams.Stream]:
        """Return the stream on which figures are waited for, by name; none on a device without streams."""
        return {} if self._stream is None else {"figures of ranks": self._stream}

    @property
    def under_way(self) -> bool:
        """Return whether a row has been given whose answer has not been taken."""
        return self._gathering is not None

    def start(self, row: Sequence[float] | Tensor) -> None:
        """Give this rank's row. Raises RuntimeError while another is under way."""
        if self.under_way:
            raise RuntimeError("an exchange is under way: finish it before another is started")
        given = torch.as_tensor(row, dtype=torch.float64)
        if self._row is not None and given.device.type == "cpu":
            given = self._row.copy_(given)
        mine = given.to(self._device, non_blocking=True)
        assert mine.shape == (self._columns,), f"a row has {self._columns} numbers"
        gathered = torch.empty(self._group.size() * self._columns, dtype=torch.float64, device=self._device)
        work = dist.all_gather_into_tensor(gathered, mine, group=self._group, async_op=True)
        assert work is not None
        # All tensors are kept: they are used on a stream that the allocator knows nothing of. Nothing waits yet: with
        # one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) a stream that waits holds up whatever is enqueued later.
        self._gathering = work, (given, mine), gathered

    def finish(self) -> list[list[float]]:
        """Wait for all ranks' rows, and return them in order of their rank in the group."""
        assert self._gathering is not None, "nothing has been started"
        (work, _, gathered), self._gathering = self._gathering, None
        if self._stream is None:
            wait_for([work], self._group, "figures of all", self._device)
        else:
            # Beside the compute stream: reading must not wait for what is computed in the meantime.
            with streams.on(self._stream):
                work.wait()
                gathered = gathered.cpu()
        rows: list[list[float]] = gathered.view(-1, self._columns).tolist()
        return rows


class JointExchange:
    """An `Exchange` in each of several groups of this rank.

    A row has `columns` doubles for each group, one group after the other, in an order that all ranks agree on.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], columns: int, device: torch.device) -> None:
        self._columns = columns
        self._each = [Exchange(group, columns, device) for group in groups]

    @property
    def named(self) -> dict[str, streams.Stream]:
        """Return the streams of all, by name and the number of the group."""
        return {f"{name}, {n}": one for n, each in enumerate(self._each) for name, one in each.named.items()}

    def start(self, row: Tensor) -> None:
        """As `Exchange.start`."""
        for exchange, own in zip(self._each, torch.split(row, self._columns), strict=True):
            exchange.start(own)

    def finish(self) -> list[list[float]]:
        """As `Exchange.finish`: all rows of the first group, then those of the next."""
        return [row for exchange in self._each for row in exchange.finish()]


def gather(value: Any, timeout: timedelta | None = None) -> list[Any] | None:
    """Return all ranks' values, as JSON has them, in order of rank, on rank 0; None elsewhere.

    Through the store in which the ranks once found each other: whatever the backend, this opens no connection between
    ranks and takes no memory of a GPU, however many they are, and only rank 0 waits. Raises DistStoreError on rank 0
    when a rank's value has not come after `timeout` (default: the job's).
    """
    root = PrefixStore("evenpipe/gather/", _get_default_store())
    # A rank may be here again before rank 0 has read what it left the last time.
    store = PrefixStore(f"{root.add(f'gathered/{dist.get_rank()}', 1)}/", root)
    if dist.get_rank() != 0:
        store.set(str(dist.get_rank()), json.dumps(value))
        return None
    values = [json.loads(json.dumps(value))]
    for rank in map(str, range(1, dist.get_world_size())):
        store.wait([rank], timeout or job_timeout())
        values.append(json.loads(store.get(rank)))
        store.delete_key(rank)
    return values
