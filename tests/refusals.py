"""What a command says when it cannot use its input."""

from __future__ import annotations

import json

import pytest

from evenpipe.cli.main import main


def refusal(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Return the one line on standard error of a command that ends with status 2, and with --json says it there too."""
    capsys.readouterr()  # what commands before it have printed
    with pytest.raises(SystemExit) as caught:
        main([*map(str, argv)])
    said = capsys.readouterr()
    assert caught.value.code == 2
    assert said.err.endswith("\n")
    assert said.err.count("\n") == 1, said.err
    if "--json" in argv:
        assert json.loads(said.out) == {"error": said.err.partition(": error: ")[2].removesuffix("\n")}
    else:
        assert said.out == ""
    return said.err
