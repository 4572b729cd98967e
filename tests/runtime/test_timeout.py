"""Ranks wait for each other as long as the user has said, in every group that EvenPipe makes."""

import ast
from pathlib import Path

import evenpipe


def test_every_new_group_is_given_a_timeout() -> None:
    """Without one it has torch's default, whatever the job's own groups have."""
    calls = [
        (path.name, call)
        for path in Path(evenpipe.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "new_group"
    ]
    assert calls
    assert [name for name, call in calls if "timeout" not in [keyword.arg for keyword in call.keywords]] == []
