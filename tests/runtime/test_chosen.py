"""What is on the host meanwhile: memory that a copy still reads is not let go of."""

import pytest
import torch

from evenpipe.runtime.host_memory import Passage
from evenpipe.runtime.memory import MemoryCounter
from evenpipe.runtime.recompute_swap import SwappedStorage


class NotedLink:
    """Copies at once, and notes which copies are waited for, as long as `saved` has what they read or write."""

    def __init__(self) -> None:
        self.waited: list[str] = []
        self.saved: SwappedStorage

    def out(self, memory: torch.Tensor) -> Passage:
        return self._started("out", memory, memory.clone())

    def back(self, host: torch.Tensor, memory: torch.Tensor) -> Passage:
        return self._started("back", memory, memory.copy_(host))

    def _started(self, way: str, memory: torch.Tensor, target: torch.Tensor) -> Passage:
        address = memory.data_ptr()

        def wait() -> None:
            assert self.saved.storage is not None
            assert self.saved.storage.data_ptr() == address
            self.waited.append(way)

        return Passage(target, wait)


@pytest.mark.parametrize(
    ("calls", "waited"),
    [
        (("leave", "recall"), ["out"]),  # which a backward that comes early asks back
        (("leave",), ["out"]),
        (("leave", "gone", "recall"), ["out", "back"]),
        ((), []),
    ],
)
def test_what_is_still_read_or_written_is_waited_for(calls, waited):
    link = NotedLink()
    link.saved = saved = SwappedStorage(torch.ones(4), link, 0, {}, MemoryCounter())
    for call in calls:
        getattr(saved, call)()
    saved.drop()
    assert saved.storage is None
    assert link.waited == waited
