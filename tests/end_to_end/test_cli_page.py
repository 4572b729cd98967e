"""The page of the command line: its file of defaults is taken, its commands run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from evenpipe.cli.main import main
from tests.readme import ROOT

PAGE = (ROOT / "docs" / "cli.md").read_text()


def test_the_file_s_defaults_are_taken_by_every_command_that_they_name(tmp_path, monkeypatch, capsys):
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)
    (tmp_path / "evenpipe.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    assert not main(["estimate", "--model", "gpt3-13b", "--global-batch-size", "1024"])
    assert "on 16x8-h100" in capsys.readouterr().out
    assert not main(["plan", "--stages", "4", "--schedule", "1f1b", "--tensor-parallel", "8"])
    assert re.search("llama3-70b on 16x8-h100 with megatron, at most 1,?024 samples", capsys.readouterr().out)


def test_the_commands_of_the_page(tmp_path):
    (block,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
    called = f'evenpipe() {{ {sys.executable} -m evenpipe "$@"; }}\n{block}'
    done = subprocess.run(["bash", "-ec", called], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in Path(tmp_path).iterdir()} == {"evenpipe-completion.zsh", "evenpipe.fish"}
