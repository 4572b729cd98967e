"""-q and -v: every command has both; notes go, warnings stay, and the traceback behind an error's line is shown."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from evenpipe.cli.main import main
from evenpipe.cli.parser import COMMANDS, Parser

WORDS = ("estimate", "--model", "gpt3-13b", "--global-batch-size", "32")
SEARCHED = ("schedule", "--schedule", "searched", "--seconds", "0.1", "--stages", "2", "--micro-batches", "4", "--json")
PART = {"forward_ms": 1, "input_gradient_ms": 1, "weight_gradient_ms": 1, "saved_bytes": 100}
COSTS = {"format": "evenpipe.costs/1", "placement": "vee", "message_ms": 0.1, "parts": [PART] * 4}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_both(command: str) -> None:
    commands = Parser("evenpipe").add_subparsers()
    import_module(f"evenpipe.cli.{command}").add_to(commands)
    names = {name for one in commands.choices[command].options() for name in one.option_strings}
    assert {"-q", "--quiet", "-v", "--verbose"} <= names


def failed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()


def test_the_traceback_is_above_the_line_of_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    bad = (*WORDS, "--cluster", "1x8-h100", "--schedule", "1f1c")
    [line] = failed(capsys, *bad)
    *lines, last = failed(capsys, *bad, "-v")
    assert last == line
    assert "Traceback (most recent call last):" in lines


def test_defaults_and_their_file_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "evenpipe.toml"
    file.write_text('cluster = "1x8-h100"\n[estimate]\nmicro-batch-size = 2\n')
    assert main([*WORDS, "--micro-batch-size", "1"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*WORDS, "--micro-batch-size", "1", "-v"]) == 0
    used = f"default: --cluster = '1x8-h100' ({file}: cluster)"
    assert capsys.readouterr().err == f"evenpipe: defaults: read {file}\nevenpipe: {used}\n"
    file.unlink()
    assert main([*WORDS, "--cluster", "1x8-h100", "--verbose"]) == 0
    assert capsys.readouterr().err == "evenpipe: defaults: no evenpipe.toml here or above\n"


def test_quiet_leaves_notes_out_and_keeps_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(COSTS))
    assert main([*SEARCHED, "--costs", str(costs)]) == 0
    assert "evenpipe: searched:" in capsys.readouterr().err
    assert main([*SEARCHED, "--costs", str(costs), "-q"]) == 0
    assert capsys.readouterr().err == ""
    asked = (*WORDS[1:], "--cluster", "1x8-h100", "--schedule", "1f1b", "--fp8-recipe", "mxfp8", "--json")
    assert main(["plan", *asked]) == 0
    warning = capsys.readouterr().err
    assert "--fp8-recipe" in warning
    assert main(["plan", *asked, "-q"]) == 0
    assert capsys.readouterr().err == warning


def test_both_at_once_and_a_script_s_run_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "not allowed with argument" in " ".join(failed(capsys, *WORDS, "-v", "-q"))
    script = tmp_path / "train.py"
    script.write_text("")
    for option in ("--quiet", "--verbose"):
        line = failed(capsys, "run", option, str(script))[-1]
        assert f"{option}: is for --estimate: add that, or leave this out" in line
