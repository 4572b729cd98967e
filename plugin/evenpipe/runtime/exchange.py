"""A few numbers of every rank, brought to every rank in the background."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Exchange", "JointExchange"]


class Exchange:
    """An asynchronous all-gather of one row of `columns` doubles a rank, again and again, over `group`.

    The ranks need not start at the same time: `start` never waits for another rank, `finish` waits for the last.
    """

    def __init__(self, group: dist.ProcessGroup, columns: int, device: torch.device) -> None:
        self._group = group
        self._columns = columns
        self._device = device
        self._gathering: tuple[dist.Work, tuple[Tensor, Tensor], Tensor] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @classmethod
    def among_all(cls, columns: int, device: torch.device) -> Exchange:
        """One for all ranks of the job, which make it at the same point."""
        world = dist.group.WORLD
        assert world is not None, "torch.distributed has been started"
        return cls(world, columns, device)

    @property
    def under_way(self) -> bool:
        """Whether a row has been given whose answer has not been taken."""
        return self._gathering is not None

    def start(self, row: Sequence[float] | Tensor) -> None:
        """Give this rank's row. Raises RuntimeError while another is under way."""
        if self.under_way:
            raise RuntimeError("an exchange is under way: finish it before another is started")
        given = torch.as_tensor(row, dtype=torch.float64)
        if self._stream is not None and given.device.type == "cpu":
            given = given.pin_memory()  # from where a copy does not wait for what is being computed
        mine = given.to(self._device, non_blocking=True)
        assert mine.shape == (self._columns,), f"a row has {self._columns} numbers"
        gathered = torch.empty(self._group.size() * self._columns, dtype=torch.float64, device=self._device)
        work = dist.all_gather_into_tensor(gathered, mine, group=self._group, async_op=True)
        assert work is not None
        # All tensors are kept: they are used on a stream that the allocator knows nothing of. Nothing waits yet: with
        # one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) a stream that waits holds up whatever is enqueued later.
        self._gathering = work, (given, mine), gathered

    def follow(self, row: Sequence[float] | Tensor) -> list[list[float]]:
        """What all ranks gave at the call before, none at the first; this rank's `row` is under way then."""
        rows = self.finish() if self.under_way else []
        self.start(row)
        return rows

    def finish(self) -> list[list[float]]:
        """Wait for all ranks' rows, and return them in order of their rank in the group."""
        assert self._gathering is not None, "nothing has been started"
        (work, _, gathered), self._gathering = self._gathering, None
        if self._stream is None:
            work.wait()
        else:
            # Beside the compute stream: reading must not wait for what is computed in the meantime.
            with torch.cuda.stream(self._stream):
                work.wait()
                gathered = gathered.cpu()
        found: list[list[float]] = gathered.view(-1, self._columns).tolist()
        return found


class JointExchange:
    """An `Exchange` in each of several groups of this rank.

    A row has `columns` doubles for each group, one group after the other, in an order that all ranks agree on.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], columns: int, device: torch.device) -> None:
        self._columns = columns
        self._each = [Exchange(group, columns, device) for group in groups]

    def start(self, row: Tensor) -> None:
        """As `Exchange.start`."""
        for exchange, own in zip(self._each, torch.split(row, self._columns), strict=True):
            exchange.start(own)

    def finish(self) -> list[list[float]]:
        """As `Exchange.finish`: all rows of the first group, then those of the next."""
        return [row for exchange in self._each for row in exchange.finish()]
