"""What departs of a micro-batch does not depend on who happens to hold a storage for a moment."""

import threading
import time

import pytest
import torch

from evenpipe.runtime import layout
from evenpipe.runtime.layout import Layouts


class Sent:
    """Takes the place of the channel to the acceptor."""

    def __init__(self) -> None:
        self.messages: list[list[int]] = []

    def send(self, tensors: list[torch.Tensor]) -> None:
        self.messages.append(tensors[1].tolist())


class Held:
    """29 storages, of which one does not depart while another thread holds it."""

    def __init__(self) -> None:
        self._held = threading.Event()

    def hold(self, seconds: float) -> None:
        def wait() -> None:
            time.sleep(seconds)
            self._held.clear()

        self._held.set()
        threading.Thread(target=wait).start()

    def sizes(self) -> list[int]:
        return [8] * (28 if self._held.is_set() else 29)


@pytest.mark.parametrize("holds", [(0.02, 0, 0), (0, 0.02, 0), (0, 0, 0.2)])
def test_a_storage_that_is_held_for_a_moment_departs(holds: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_FIRST_SECONDS", 0.5)  # on a busy machine, threads end late
    monkeypatch.setattr(layout, "_TRIES", 1000)
    sent, held = Sent(), Held()
    layouts = Layouts(sent)  # type: ignore[arg-type]
    for seconds in holds:
        if seconds:
            held.hold(seconds)
        layouts.tell(0, held.sizes)
    assert sent.messages == [[8] * 29]


def test_micro_batches_of_two_sizes_are_an_error() -> None:
    layouts = Layouts(Sent())  # type: ignore[arg-type]
    layouts.tell(0, lambda: [8, 8])
    with pytest.raises(
        RuntimeError, match="saved 8 bytes in 1 storages where an earlier one saved 16 in 2: BPipe needs"
    ):
        layouts.tell(0, lambda: [8])
