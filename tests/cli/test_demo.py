"""`evenpipe demo` beside its runs, which `make demo` trains."""

from __future__ import annotations

import os

import pytest

from evenpipe.cli import demo
from evenpipe.cli.main import main


@pytest.mark.parametrize("load", [0.0, 1e6])
def test_a_busy_machine_is_told_of_before_times_are_taken(
    load: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*of: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(demo, "run_training", train)
    with pytest.raises(SystemExit, match="3"):
        main(["demo"])
    said = capsys.readouterr().err
    assert said.count("\n") == (1 if load else 0)
    assert said.startswith("evenpipe demo: The machine was busy" if load else "")
