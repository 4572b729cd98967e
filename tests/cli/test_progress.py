"""Progress: on a terminal what is done, for how long and how much longer; elsewhere nothing."""

from __future__ import annotations

import inspect
import io
import re
import time
from argparse import Namespace
from collections.abc import Callable
from typing import cast

import pytest
from rich.console import Console

from evenpipe.cli import fit, plan
from evenpipe.cli import progress as shown
from evenpipe.cli.progress import progress
from evenpipe.cli.verbosity import speaking
from evenpipe.fitting import answers
from evenpipe.planner.search.question import Question


def text_of(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=80, color_system=None)
    monkeypatch.setattr(shown, "console_of", lambda stderr: console)
    with progress("partition", "tracing") as show:
        time.sleep(0.2)
        for done in range(3):
            show("profiling", done, 4)
            time.sleep(0.2)
    return file.getvalue()


def test_a_terminal_is_told_what_is_done_and_how_long_it_still_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(monkeypatch, True)
    assert "partition: tracing, 0 s" in text
    assert "partition: profiling, 0 s, 2 of 4, about 0 s left" in text or "2 of 4, about 1 s left" in text


def test_a_search_shows_how_many_runs_wait_and_guesses_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that wait are simulated or left out at once: a pace so far once said 139 s where 48 s were left."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(shown, "console_of", lambda stderr: console)

    def search(question: object, top: int, told: Callable[[int, int], None], with_front: bool) -> object:
        for done in range(4):
            told(done, 1200 - done)
            time.sleep(0.15)
        return found

    found = object()
    monkeypatch.setattr(plan, "search", search)
    assert plan.search_shown("plan", cast(Question, None), 1) is found
    text = file.getvalue()
    assert re.search(r"plan: \d runs simulated, 1,19\d to weigh, \d s", text)
    assert "left" not in text


def test_a_file_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not text_of(monkeypatch, False).strip()


def test_quiet_shows_none_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with speaking(Namespace(quiet=True, verbose=False)):
        assert not text_of(monkeypatch, True).strip()
    assert "profiling" in text_of(monkeypatch, True)


def test_lines_are_for_a_file_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(shown, "console_of", lambda stderr: Console(file=file, force_terminal=False, width=80))
    with progress("train", "starts", lines=True) as show:
        show("stock: iteration 1/2", 1, 2)
    assert file.getvalue().strip() == "stock: iteration 1/2"


def test_every_step_of_fit_has_its_share_of_the_time() -> None:
    named = re.findall(r'asked\.step\("([^"]+)"\)', inspect.getsource(answers))
    assert named == list(fit._BEHIND)
    assert sorted(fit._BEHIND.values()) == list(fit._BEHIND.values())
