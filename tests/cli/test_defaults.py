"""Options may have their defaults in a file; what a command line says counts, and errors name the file."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from evenpipe.cli.defaults import SHARED
from evenpipe.cli.main import main
from evenpipe.cli.parser import COMMANDS, Parser
from tests.refusals import refusal

ESTIMATE = ("estimate", "--model", "gpt3-13b", "--global-batch-size", "32", "--json")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    yield tmp_path
    os.environ.pop("COLUMNS", None)


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert not main(words)
    return json.loads(capsys.readouterr().out)


def test_a_required_option_may_come_from_the_file_and_the_command_line_counts_before_it(here, capsys):
    (here / "evenpipe.toml").write_text('cluster = "1x8-h100"\n[estimate]\nmicro-batch-size = 2\nbpipe = false\n')
    given = ("--cluster", "1x8-h100", "--micro-batch-size", "2")
    assert document(capsys, *ESTIMATE) == document(capsys, *ESTIMATE, *given)
    other = document(capsys, *ESTIMATE, "--cluster=1x8-a100-80gb", "--micro-batch=1")
    (here / "evenpipe.toml").unlink()
    assert other == document(capsys, *ESTIMATE, "--cluster", "1x8-a100-80gb", "--micro-batch-size", "1")


def test_a_pyproject_above_counts_where_it_has_the_table_and_the_nearest_file_alone(here, capsys, monkeypatch):
    (here / "pyproject.toml").write_text('[tool.evenpipe]\ncluster = "1x8-h100"\n')
    deeper = here / "a" / "b"
    deeper.mkdir(parents=True)
    monkeypatch.chdir(deeper)
    (here / "a" / "pyproject.toml").write_text('[project]\nname = "another"\n')
    expected = document(capsys, *ESTIMATE, "--cluster", "1x8-h100")
    assert document(capsys, *ESTIMATE) == expected
    (here / "a" / "evenpipe.toml").write_text("")
    assert "missing --cluster" in refusal(capsys, *ESTIMATE[:-1])


def test_an_option_that_excludes_a_default_takes_its_place(here, capsys):
    (here / "evenpipe.toml").write_text('cluster = "1x8-h100"\n[estimate]\nmodel = "nothing"\n')
    assert "--hf nowhere" in refusal(capsys, "estimate", "--hf", "nowhere", "--global-batch-size", "32")


def test_width_is_that_of_tables_unless_the_environment_has_one(here, capsys, monkeypatch):
    (here / "evenpipe.toml").write_text("width = 50\n")
    words = ("schedule", "--schedule", "1f1b", "--stages", "4", "--micro-batches", "32")
    main(words)
    assert 40 < max(map(len, capsys.readouterr().out.splitlines())) <= 50
    monkeypatch.setenv("COLUMNS", "90")
    main(words)
    assert 50 < max(map(len, capsys.readouterr().out.splitlines())) <= 90


BAD = {
    'clustr = "x"': "evenpipe.toml: clustr: unknown key, did you mean cluster?",
    "[plann]": "evenpipe.toml: plann: unknown key, did you mean plan?",
    "plan = 3": "evenpipe.toml: plan: is a command, so give a table: [plan]",
    "[estimate]\nprecison = 1": "[estimate] precison: unknown option of evenpipe estimate, did you mean precision?",
    "x = [": "evenpipe.toml: is no TOML",
    "width = 3": "evenpipe.toml: width: 3 is no number of columns from 40 on",
    'cluster = "1x8-h1000"': "--cluster 1x8-h1000: unknown among clusters",
    "cluster = true": "--cluster: True is no value of it",
    "[estimate]\nmicro-batch-size = 0": "--micro-batch-size: '0' is no whole number of at least 1",
    "[estimate]\nbpipe = 3": "--bpipe: 3 is no value of it: give true or false",
    '[estimate]\nprecision = "bf17"': "--precision: bf17: unknown, did you mean bf16?",
    '[estimate]\nrecompute-modules = ["mlp", "x"]': "--recompute-modules: x: unknown, choose one of",
    '[estimate]\nhf = "a"\nmodel = "b"': "[estimate] model: cannot be there beside hf: keep one of them",
    "[estimate]\nmicro-batch-size = [1, 2]": "--micro-batch-size: [1, 2] is no value of it",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_wrong_is_one_line_that_names_the_file(text, here, capsys):
    (here / "evenpipe.toml").write_text(text)
    said = refusal(capsys, *ESTIMATE[:-1], *([] if "cluster" in text else ["--cluster", "1x8-h100"]))
    assert BAD[text] in said
    assert str(here / "evenpipe.toml") in said


def test_a_switch_that_is_false_is_one_that_is_not_given(here, capsys):
    tiny = "stages = 2\nlayers = 2\nhidden = 16\nheads = 2\nseq-length = 16\nmicro-batches = 4\niterations = 1\n"
    (here / "evenpipe.toml").write_text(f'[train]\n{tiny}engine = "module"\nquiet = true\nbpipe = false\n')
    settings = document(capsys, "train", "--json")["settings"]
    assert (settings["bpipe"], settings["layers"], settings["iterations"]) == (False, 2, 1)


def test_a_script_and_the_help_ask_no_file(here, capsys):
    (here / "evenpipe.toml").write_text("x = [")
    (here / "train.py").write_text("print('trains')")
    with pytest.raises(SystemExit) as ended:
        main(["estimate", "--help"])
    assert ended.value.code == 0
    assert "nowhere.py" in refusal(capsys, "run", "nowhere.py")


@pytest.mark.parametrize("key", sorted(set(SHARED) - {"width"}))
def test_a_shared_key_is_an_option_of_its_commands(key):
    for command in SHARED[key]:
        parser = Parser(command)
        commands = parser.add_subparsers()
        import_module(f"evenpipe.cli.{command}").add_to(commands)
        names = {name for one in commands.choices[command].options() for name in one.option_strings}
        assert f"--{key}" in names
    assert set(SHARED[key]) <= set(COMMANDS)
