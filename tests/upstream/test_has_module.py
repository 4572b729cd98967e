"""An emptied folder is no module, although Python imports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenpipe.upstream.installed import has_module


def test_what_an_uninstallation_leaves_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "emptied" / "core" / "__pycache__").mkdir(parents=True)
    whole = tmp_path / "whole" / "core"
    whole.mkdir(parents=True)
    (whole / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not has_module("emptied.core")
    assert not has_module("nowhere.core")
    assert has_module("whole.core")
