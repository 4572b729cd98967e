"""Completion scripts: what a shell proposes is what the parsers know."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from evenpipe.cli.completion import SHELLS
from evenpipe.cli.main import main
from evenpipe.cli.parser import COMMANDS

Proposed = Callable[..., list[str]]


def script(capsys: pytest.CaptureFixture[str], shell: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["--completion", shell])
    assert ended.value.code == 0
    return capsys.readouterr().out


#: What a line that ends so is completed to.
COMPLETED = [
    ("pla", "plan"),
    ("plan --micro", "--micro-batch-size"),
    ("plan --precision bf", "bf16"),
    ("schedule --costs co", "costs.json"),
    ("--vers", "--version"),
]


def in_zsh(script: Path, line: str) -> str:
    """Return what a tab makes of `line` in a zsh at a terminal, once it has read the script."""
    child, terminal = pty.fork()
    if not child:
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb"})
    # ^A goes to the line's start: the completed line is then what is printed.
    typed = f"autoload -Uz compinit && compinit -D; source {script}\n{line}\t\x01echo >completed \nexit\n"
    os.write(terminal, typed.encode())
    with contextlib.suppress(OSError):  # of a terminal whose shell has ended
        while os.read(terminal, 65536):
            pass
    os.close(terminal)
    os.waitpid(child, 0)
    return Path("completed").read_text().strip()


def in_fish(script: Path, line: str) -> str:
    """Return `line` with the one end that fish proposes."""
    command = f"source {script}; complete -C '{line}'"
    done = subprocess.run(["fish", "--no-config", "-c", command], capture_output=True, text=True, check=True)
    [proposed] = done.stdout.splitlines()
    return " ".join([*line.split()[:-1], proposed.split("\t")[0]])


@pytest.fixture
def proposed(capsys: pytest.CaptureFixture[str]) -> Proposed:
    """What bash completes the last of these words to, after `evenpipe`."""
    text = script(capsys, "bash")

    def ask(*words: str) -> list[str]:
        line = f'COMP_WORDS=(evenpipe "$@"); COMP_CWORD={len(words)}; _evenpipe; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", f"{text}{line}", "bash", *words], capture_output=True, text=True)
        assert done.stderr == ""
        return done.stdout.split()

    return ask


def test_commands_options_and_choices(proposed: Proposed) -> None:
    assert set(COMMANDS) <= set(proposed(""))
    assert proposed("pla") == ["plan"]
    assert proposed("plan", "--micro") == ["--micro-batch-size"]
    assert proposed("plan", "--precision", "")[:4] == ["fp32", "fp16", "bf16", "fp8"]
    assert proposed("estimate", "--attention", "") == ["unfused", "flash"]
    assert proposed("estimate", "--bpipe", "--no-such") == []


def test_files_are_completed_where_an_option_takes_one(proposed: Proposed, tmp_path, monkeypatch) -> None:
    (tmp_path / "costs.json").touch()
    monkeypatch.chdir(tmp_path)
    assert proposed("schedule", "--costs", "co") == ["costs.json"]
    assert proposed("report", "co") == ["costs.json"]


def test_fish_has_a_line_for_each_command_and_each_option_with_its_words(capsys) -> None:
    lines = script(capsys, "fish").splitlines()
    assert len(lines) > 200
    assert all(line.startswith("complete -c evenpipe -n ") for line in lines)
    assert [line for line in lines if "from plan'" in line and " -l attention -x -a 'unfused flash'" in line]
    named = {match[1] for line in lines if (match := re.search(r"seen_subcommand_from (\w+)'", line))}
    assert named == set(COMMANDS)


@pytest.mark.parametrize(("line", "end"), COMPLETED)
@pytest.mark.parametrize("ask", [in_zsh, in_fish])
def test_zsh_and_fish_complete_the_same(
    ask: Callable[[Path, str], str], line: str, end: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    shell = ask.__name__.removeprefix("in_")
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    (tmp_path / "costs.json").touch()
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "script"
    file.write_text(script(capsys, shell))
    assert ask(file, f"evenpipe {line}") == f"evenpipe {' '.join([*line.split()[:-1], end])}"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_that_is_here_takes_its_script(shell: str, capsys) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    done = subprocess.run([shell, "-n"], input=script(capsys, shell), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "said"), [(["tcsh"], "choose one of bash, zsh, fish"), ([], "expected one argument")]
)
def test_another_shell_is_refused(words: list[str], said: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--completion", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
