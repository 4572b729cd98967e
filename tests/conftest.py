"""Settings that all tests share."""

import os
from typing import Any

import pytest
from hypothesis import settings

# Machines that run several processes at once are no place for deadlines per example.
settings.register_profile("evenpipe", deadline=None)
settings.load_profile("evenpipe")

# Tests start hundreds of processes; each would compile what it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, since most tests wait for processes half of their time."""
    return min(os.cpu_count() or 1, 7) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file share what it has started, so one worker runs them; script tests have starts of their own."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith("tests/megatron_lm/") else nodeid.partition("::")[0]

    return ByFile(config, log)
