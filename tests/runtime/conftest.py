"""Tests of what moves data in one process run twice: plainly, and under the checker of races."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import is_hypothesis_test

from tests.rig.checked import checking
from tests.rig.clocks import Device
from tests.rig.races import Memory

CHECKED: Final = (
    *("test_memory", "test_recompute_swap"),
    *("test_store_counting", "test_store_moving", "test_weight_versions"),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in CHECKED and not is_hypothesis_test(metafunc.function):
        metafunc.parametrize("checker", [False, True], ids=["plain", "checked"], indirect=True)


@pytest.fixture(autouse=True)
def checker(request: pytest.FixtureRequest) -> Iterator[None]:
    """Require that the checker of races reports nothing of the test, if the parameter is true.

    Tests with drawn examples run plainly: an example of the store takes 0.4 s under the checker. So does
    `test_composed.py`, whose tensors have no memory of their own, and `test_keeper.py`, which drops a wait.
    `test_races.py` checks the processes of `channel_cases.py`, `executor_cases.py`, `keeper_cases.py` and
    `stream_cases.py`, and `HostLink`.
    """
    if not getattr(request, "param", False):
        yield
        return
    with checking(Memory(Device())) as memory:
        yield
    assert memory.races == {}
