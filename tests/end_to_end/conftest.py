"""Runs that end with the test that started them."""

from collections.abc import Callable, Iterator

import pytest

from tests.end_to_end.running import Run


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    """A run that trains, its first iteration behind it."""
    runs = []

    def start(*flags: str, **changes: str) -> Run:
        runs.append(Run(*flags, **changes))
        runs[-1].wait_for_first_iteration()
        return runs[-1]

    yield start
    for started in runs:
        started.end()
