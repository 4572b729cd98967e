"""What coding agents and containers are told is true: each command works, each path is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evenpipe.cli.main import main
from evenpipe.megatron.supported import RELEASES
from tests.end_to_end.test_readme import MODEL
from tests.readme import ROOT, commands

SKILLS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(".agents/skills/*/SKILL.md"))
AGENTS = (ROOT / "AGENTS.md").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def _of_skills(kind: str) -> list[list[str]]:
    return [words for skill in SKILLS for words in commands(skill) if words[0] == kind]


def test_a_skill_says_what_it_is_for_and_is_short():
    assert len(SKILLS) == 3
    for skill in SKILLS:
        assert skill in AGENTS
        text = (ROOT / skill).read_text()
        (name, about) = re.match(r"---\nname: (.+)\ndescription: (.+)\n---\n\n# ", text).groups()
        assert name == Path(skill).parent.name
        assert "Use when" in about
        assert len(text.splitlines()) <= 60
        assert {words[0] for words in commands(skill)} <= {"evenpipe", "torchrun"}


def _marked(words: list[str]) -> Any:
    """A trace of a model takes long; `tests/end_to_end/test_readme.py` has such commands too."""
    return pytest.param(words, marks=[pytest.mark.long] if words[1] == "partition" else [])


@pytest.mark.parametrize("words", map(_marked, _of_skills("evenpipe")), ids=lambda words: " ".join(words[1:4]))
def test_a_command_of_a_skill(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = (*MODEL, "--global-batch-size", "64")
    yours = [flag for word in words[1:] for flag in (model if word == "<flags of pretrain_gpt.py>" else (word,))]
    assert not main(yours)
    assert capsys.readouterr().out
    assert "--out" not in words or (tmp_path / words[words.index("--out") + 1]).is_file()


@pytest.mark.gate
@pytest.mark.parametrize("words", _of_skills("torchrun"), ids=" ".join)
def test_a_command_that_starts_a_job(words):
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr  # that it finds something here is no failure
    assert "links" in done.stdout


def test_a_hang_s_lines_are_those_that_a_run_prints():
    """The words of the table are those of the code."""
    code = (ROOT / "plugin/evenpipe/runtime/heartbeat.py").read_text()
    lines = re.findall(r"^ +\| `rank 2 (?:\(stage 2\) )?(.+?)(?: for 480 s)?` \|", (ROOT / SKILLS[2]).read_text(), re.M)
    assert len(lines) == 4
    assert all(line in code for line in lines)


def test_what_agents_build_with():
    found = commands("AGENTS.md")
    assert {words[0] for words in found} == {"make", ".venv/bin/python"}
    for words in found:
        if words[0] == "make":
            subprocess.run([*words, "--dry-run"], cwd=ROOT, check=True, capture_output=True)
        else:
            assert words[1:-1] == ["-m", "pytest", "-q"]
            assert (ROOT / words[-1]).is_file()


def test_what_agents_are_led_to_is_there():
    assert len(AGENTS.splitlines()) <= 60
    named = re.findall(r"`((?:[\w.-]+/)+[\w.]*)`", AGENTS)
    assert len(named) > 15
    for name in named:
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "plugin/evenpipe")), name


def test_the_dockerfile_s_words():
    """That it builds is told of nowhere: it says itself that nobody has tried."""
    assert "Untested" in DOCKERFILE.partition("FROM")[0]
    joined = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in joined.splitlines() if line]
    assert {word for word, _ in lines} <= {"ARG", "FROM", "RUN", "ENV", "COPY", "WORKDIR", "CMD"}
    defaults = dict(rest.split("=") for word, rest in lines if word == "ARG")
    assert set(re.findall(r"\$\{(\w+)\}", joined)) == set(defaults)
    (release,) = re.fullmatch(r"core_v(\d+\.\d+)\.\d+", defaults["MEGATRON_LM"]).groups()
    assert release in RELEASES
    shellcheck = Path(sys.executable).with_name("shellcheck")
    for word, rest in lines:
        if word == "RUN":
            done = subprocess.run([shellcheck, "-s", "bash", "-"], input=rest, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout
    setup = (ROOT / "setup.py").read_text()
    assert all(f'"{one}"' in setup for one in re.findall(r"'(\w+[<>=][^']*)'", joined)), "bounds are setup.py's"
    required = re.search(r"install_requires=\[(.*?)\]", setup, re.S)[1]
    for name in re.findall(r'"([a-z]+)', required):
        assert name in joined or name in ("torch", "numpy", "python_version"), (
            f"{name} is the container's, or has to be installed"
        )
