"""What the tests that are to run ask for, so that a start that many of them share does no more than that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["marked", "selected"]


def selected(request: pytest.FixtureRequest, parameter: str, others: Iterable[Any] = ()) -> set[Any]:
    """All values of `parameter` in the tests that want this fixture, less those that `-m` or `-k` leaves out.

    `others` are added if one of these tests has no such parameter.
    """
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    here = [item for item in items if item.module is request.module and request.fixturename in item.fixturenames]
    params = [item.callspec.params if hasattr(item, "callspec") else {} for item in here]
    found = {one[parameter] for one in params if parameter in one}
    return found.union(others) if any(parameter not in one for one in params) else found


def marked(names: Iterable[Any], long: Iterable[str]) -> list[Any]:
    """Parameters of tests: a name, or several of which the first one counts; `long` are those that take long."""
    apart = set(long)

    def one(values: tuple[Any, ...]) -> Any:
        return pytest.param(*values, marks=[pytest.mark.long] if values[0] in apart else [])

    return [one(values if isinstance(values, tuple) else (values,)) for values in names]
