"""Settings that all tests share."""

import os

import pytest
from hypothesis import settings

# Machines that run several processes at once are no place for deadlines per example.
settings.register_profile("evenpipe", deadline=None)
settings.load_profile("evenpipe")

# Tests start hundreds of processes; each would compile what it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, since most tests wait for processes half of their time."""
    return min(os.cpu_count() or 1, 7) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file share what it has started, so one worker runs them; script tests have starts of their own."""
    for item in items:
        if item.get_closest_marker("megatron_lm") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
