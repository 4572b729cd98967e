"""A few numbers of every rank, brought to every rank in the background."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Exchange"]


class Exchange:
    """An asynchronous all-gather of one row of `columns` doubles a rank, again and again, over `group`.

    The ranks need not start at the same time: `start` never waits for another rank, `finish` waits for the last.
    """

    def __init__(self, group: dist.ProcessGroup, columns: int, device: torch.device) -> None:
        self._group = group
        self._columns = columns
        self._device = device
        self._rows: Tensor | None = None
        self._work: dist.Work | None = None
        self._copied: torch.cuda.Event | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def under_way(self) -> bool:
        """Whether a row has been given whose answer has not been taken."""
        return self._rows is not None

    def start(self, row: Sequence[float] | Tensor) -> None:
        """Give this rank's row. Raises RuntimeError while another is under way."""
        if self.under_way:
            raise RuntimeError("an exchange is under way: finish it before another is started")
        mine = torch.as_tensor(row, dtype=torch.float64).to(self._device)
        assert mine.shape == (self._columns,), f"a row has {self._columns} numbers"
        gathered = torch.empty(self._group.size() * self._columns, dtype=torch.float64, device=self._device)
        work = dist.all_gather_into_tensor(gathered, mine, group=self._group, async_op=True)
        assert work is not None
        if self._stream is None:
            self._rows, self._work = gathered, work
            return
        # To host memory beside the compute stream: reading must not wait for what is computed in the meantime.
        with torch.cuda.stream(self._stream):
            work.wait()
            self._rows = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            self._rows.copy_(gathered, non_blocking=True)
            gathered.record_stream(self._stream)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)

    def finish(self) -> list[list[float]]:
        """Wait for all ranks' rows, and return them in order of their rank in the group."""
        assert self._rows is not None, "nothing has been started"
        if self._work is not None:
            self._work.wait()
        if self._copied is not None:
            self._copied.synchronize()
        rows = self._rows.view(-1, self._columns).tolist()
        self._rows = self._work = self._copied = None
        return rows
