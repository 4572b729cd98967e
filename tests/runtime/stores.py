"""What the tests of the activation store do with it: send a micro-batch away and back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from evenpipe.runtime import streams
from evenpipe.runtime.store import ActivationStore

HOST = torch.device("cpu")


@contextmanager
def beside_compute() -> Iterator[None]:
    """Give work to a stream of its own, as a message's is, which waits for compute and which compute then waits for."""
    compute, link = streams.current(HOST), streams.opened(HOST)
    link.wait_stream(compute)
    with streams.on(link):
        yield
    compute.wait_stream(link)


def shippable(store: ActivationStore, key: object) -> list[Tensor]:
    """The message as which the store moves what it would move now."""
    sizes = store.seal(key)
    before = store.counter.own_bytes
    views = store.ship(key)
    assert sum(view.numel() for view in views) == sum(sizes)
    assert store.counter.own_bytes == before
    return views


def evict(store: ActivationStore, key: object) -> list[Tensor]:
    """Take a micro-batch's memory away, as a send to the partner does; return what the partner then has."""
    views = shippable(store, key)
    memory = [StorageWeakRef(view.untyped_storage()) for view in views]
    with beside_compute():
        copies = [view.clone() for view in views]
    del views
    store.release(key)
    assert all(storage.expired() for storage in memory)
    return copies


def load(store: ActivationStore, key: object, copies: Sequence[Tensor]) -> None:
    views = store.refill(key)
    assert [view.numel() for view in views] == [copy.numel() for copy in copies]
    with beside_compute():
        for view, copy in zip(views, copies, strict=True):
            view.copy_(copy)
        del view
    del views
    store.unpack(key)
