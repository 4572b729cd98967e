"""Every command of the tutorial runs, one after the other, and prints what the page shows; the losses never change."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evenpipe.cli.main import main
from tests.readme import ROOT, commands

TUTORIAL = "docs/tutorial.md"

pytestmark = pytest.mark.gate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tutorial")


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, str]:
    """What each command of `evenpipe` prints, in the order of the page."""
    outputs = {}
    for words in commands(TUTORIAL):
        if words[0] == "evenpipe":
            command = [sys.executable, "-m", *words]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
            outputs[" ".join(words)] = done.stdout
    return outputs


def test_what_is_installed_is_an_extra(folder):
    (words,) = (words for words in commands(TUTORIAL) if words[0] == "pip")
    offline = ("--dry-run", "--no-deps", "--no-build-isolation")
    done = subprocess.run([sys.executable, "-m", *words, *offline], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stderr


def test_the_page_s_tables_are_what_the_command_before_them_prints(printed):
    page = (ROOT / TUTORIAL).read_text()
    shown = re.findall(r"```bash\n(evenpipe [^`]*?)\n```\n\n```\n([^`]*)```", page, re.S)
    assert len(shown) == 3
    for command, table in shown:
        lines = [line.split() for line in printed[command].splitlines()]
        for row in table.splitlines():
            assert row.split() in lines, command


def test_the_bubbles_are_those_of_the_simulations(printed):
    page = (ROOT / TUTORIAL).read_text()
    found = [re.search(r"bubble (.*)", text)[1] for command, text in printed.items() if " simulate " in command]
    assert "The bubbles are {} and {} of the time".format(*found) in page


def test_losses_are_the_stock_run_s(printed, folder):
    runs = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("stock", "bpipe", "v")}
    assert len({tuple(run["losses_hex"]) for run in runs.values()}) == 1
    assert runs["stock"]["weights_sha256"] == runs["bpipe"]["weights_sha256"]


def test_what_commands_write_is_there(printed, folder):
    for name in ("stock.png", "stock.html", "plan.html"):
        assert (folder / name).stat().st_size > 10_000
    assert (folder / "run" / "README.md").exists()


def test_the_plan_ends_with_the_recipe_of_the_page(printed):
    (plan,) = (text for command, text in printed.items() if " plan " in command)
    (recipe,) = (command for command in printed if " recipe " in command)
    assert plan.splitlines()[-1].replace("--out DIR", "--out run") == recipe


def test_words_after_the_page_are_options(capsys):
    """Those that are shown in a sentence, since they need more than a laptop."""
    for words in (["fit", "--cluster"], ["run", "--cpu"]):
        with pytest.raises(SystemExit):
            main([words[0], "--help"])
        assert words[1] in capsys.readouterr().out
