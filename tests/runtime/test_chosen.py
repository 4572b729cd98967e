"""What is on the host meanwhile: memory that a copy still reads is not let go of."""

import pytest
import torch

from evenpipe.runtime.chosen import SwappedStorage
from evenpipe.runtime.counters import MemoryCounter
from evenpipe.runtime.host_link import Passage


class NotedLink:
    """Copies at once, and notes which copies are waited for."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def out(self, memory: torch.Tensor) -> Passage:
        return Passage(memory.clone(), lambda: self.waited.append("out"))

    def back(self, host: torch.Tensor, memory: torch.Tensor) -> Passage:
        return Passage(memory.copy_(host), lambda: self.waited.append("back"))


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
    saved = SwappedStorage(torch.ones(4), link, 0, {}, MemoryCounter())
    for call in calls:
        getattr(saved, call)()
    saved.drop()
    assert link.waited == waited
