"""Settings that all tests share."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# Machines that run several processes at once are no place for deadlines per example. Each run draws other examples.
settings.register_profile("evenpipe", deadline=None, max_examples=25)
settings.register_profile("more", deadline=None, max_examples=150)  # make test-all
settings.load_profile("evenpipe")

# Tests start hundreds of processes; each would compile what it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A pipeline's ranks share the cores; and what one process computes has the bits of what they do with one thread each.
os.environ["OMP_NUM_THREADS"] = "1"
# Text is as wide as it needs to be, where a test does not say how wide the terminal is.
os.environ.pop("COLUMNS", None)


def pytest_runtest_teardown() -> None:
    """A command that finds an evenpipe.toml sets the width for its process, which is that of other tests too."""
    os.environ.pop("COLUMNS", None)


@pytest.fixture
def alone() -> Iterator[Any]:
    """A job of one process: the group of all ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, since most tests wait for processes half of their time."""
    return min(os.cpu_count() or 1, 7) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no worker is left alone with it at the end."""
    rooms = ["end_to_end", "megatron", "deepspeed", "simulate", "schedule"]

    def place(item: pytest.Item) -> int:
        room = item.nodeid.split("/")[1]
        return rooms.index(room) if room in rooms else len(rooms)

    items.sort(key=place)


#: Files whose tests share nothing that has been started.
_APART = (
    "tests/megatron_lm/",
    "tests/deepspeed/test_failures.py",
    "tests/end_to_end/test_examples.py",
    "tests/end_to_end/test_third_party.py",
    "tests/end_to_end/test_train_failures.py",
    "tests/schedule/test_mutants.py",
    "tests/simulate/test_device.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file share what it has started, so one worker runs them, unless they have starts of their own."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith(_APART) else nodeid.partition("::")[0]

    return ByFile(config, log)
