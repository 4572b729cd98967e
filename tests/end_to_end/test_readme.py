"""Every command of the README runs: here, and those that need a launcher or a checkout where these are tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evenpipe.cli.main import main
from tests.readme import ROOT, commands, commands_of, kind_of

#: Kinds of commands, and the file that runs them.
RUN_BY = {
    "evenpipe": "tests/end_to_end/test_readme.py",
    "doctor": "tests/end_to_end/test_readme.py",
    "pip": "tests/end_to_end/test_readme.py",
    "make": "tests/end_to_end/test_readme.py",
    "megatron": "tests/megatron_lm/test_readme.py",
    "deepspeed": "tests/end_to_end/test_examples.py",
}
MODEL = (
    *("--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "1024"),
    *("--vocab-size", "32000", "--pipeline-model-parallel-size", "4", "--micro-batch-size", "1", "--bf16"),
)


def test_each_command_is_run_by_some_test():
    assert len(commands()) > 15
    for words in commands():
        assert f'commands_of("{kind_of(words)}")' in (ROOT / RUN_BY[kind_of(words)]).read_text(), words


def test_the_first_screen_has_the_command_the_picture_and_what_needs_no_gpu():
    screen = (ROOT / "README.md").read_text().partition("\n## ")[0]
    assert len(screen.rstrip().splitlines()) <= 40
    for wanted in (
        "evenpipe run pretrain_gpt.py",
        "](docs/gain.png)",
        "| your problem |",
        "**Leave it out**",
        "make demo",
    ):
        assert wanted in screen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands run, each beside the files of those before it."""
    return tmp_path_factory.mktemp("readme")


@pytest.mark.parametrize("words", commands_of("evenpipe"), ids=lambda words: " ".join(words[1:5]))
def test_a_command_that_needs_nothing(words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    if words[1] == "report" and not (folder / words[2]).exists():
        main(next(other for other in commands_of("evenpipe") if words[2] in other and other[1] == "train")[1:])
    yours = [flag for word in words[1:] for flag in (MODEL if word == "<flags of pretrain_gpt.py>" else (word,))]
    assert not main(yours)
    assert capsys.readouterr().out or words[1] == "report"
    assert all((folder / word).exists() for word in words if word in ("DIR", "p.png", "RUN.json", "OUT.html"))


def test_the_recipe_is_the_one_that_the_plan_ends_with(capsys):
    (plan,) = (words for words in commands_of("evenpipe") if words[1] == "plan")
    (recipe,) = (words for words in commands_of("evenpipe") if words[1] == "recipe")
    main(plan[1:])
    assert capsys.readouterr().out.splitlines()[-1].split() == recipe


@pytest.mark.gate
@pytest.mark.parametrize("words", commands_of("doctor"), ids=" ".join)
def test_the_doctor(words, tmp_path):
    """It looks at two ranks of this machine: that it finds something is no failure."""
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    asked = [str(tmp_path) if word == "DIR" else word for word in words[words.index("-m") :]]
    done = subprocess.run([*launched, *asked], capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    assert "links" in done.stdout


@pytest.mark.parametrize("words", commands_of("pip"), ids=" ".join)
def test_what_is_installed_is_here(words):
    offline = ["--dry-run", "--no-deps", "--no-build-isolation"]
    command = [sys.executable, "-m", *words, *offline]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Would install evenpipe-" in done.stdout


@pytest.mark.gate
@pytest.mark.parametrize("words", commands_of("make"), ids=" ".join)
def test_what_make_runs(words, tmp_path, monkeypatch, capsys):
    """Without preparing .venv, which `tests/test_setup.py` looks at."""
    shown = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in shown.splitlines() if "bin/evenpipe" in line)
    monkeypatch.chdir(tmp_path)
    assert not main(line.split()[1:])
    assert "bit-identical" in capsys.readouterr().out
    assert {"demo.png", "demo.html"} <= {path.name for path in tmp_path.iterdir()}
