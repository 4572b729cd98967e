"""``evenpipe patches``: the table, the document, and whether a checkout is supported."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from evenpipe.cli.main import main
from tests.refusals import refusal

ROOT = Path(__file__).resolve().parent.parent.parent


def in_its_own_process(path: Path | None = None) -> tuple[dict[str, Any], list[str]]:
    """The document of a process that imports from `path` first, and which of torch's devices it has started."""
    code = """
import sys
from evenpipe.cli.main import main
status = main(["patches", "--json"])
import torch
started = ["cuda"] * torch.cuda.is_initialized() + ["distributed"] * torch.distributed.is_initialized()
print(*started)
raise SystemExit(status)
"""
    given = [str(path)] if path else []
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*given, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    document, started = done.stdout.splitlines()
    return json.loads(document), started.split()


def states(document: dict[str, Any], package: str) -> set[str]:
    return {each["state"] for each in document["symbols"] if each["symbols"][0].startswith(f"{package}.")}


def test_what_is_installed_fits_and_nothing_is_started_or_replaced() -> None:
    pytest.importorskip("megatron.core")
    document, started = in_its_own_process()
    assert started == []
    assert document["format"] == "evenpipe.patches/1"
    assert document["supported"] is True
    assert document["problems"] == document["cpu_mode_problems"] == []
    assert states(document, "torch") == states(document, "megatron.core") == {"fits"}
    has_scripts = (Path(document["path"]) / "megatron" / "training").is_dir()
    assert states(document, "megatron.training") == {"fits" if has_scripts else "absent"}
    [flags] = [each for each in document["symbols"] if each["set"] == "flags"]
    assert flags["symbols"] == ["megatron.training.arguments:add_megatron_arguments"]
    assert (flags["patch"], flags["needed_for"]) == ("flags", "training")
    assert flags["series"][0] == "0.14"
    assert flags["reason"]
    if importlib.util.find_spec("deepspeed") is None:
        assert document["deepspeed"] is None
    else:
        assert document["deepspeed"]["supported"] is True
        assert document["deepspeed"]["version"] == metadata.version("deepspeed")
        assert states(document["deepspeed"], "deepspeed.runtime") == {"fits"}


@pytest.mark.gate
def test_a_megatron_that_cannot_be_imported_is_a_state(tmp_path: Path) -> None:
    """Whatever it raises; and an apex that is not NVIDIA's is named."""
    for name in ("megatron", "apex"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('out of order')\n")
    document, started = in_its_own_process(tmp_path)
    assert started == []
    assert (document["supported"], document["version"], document["path"]) == (False, None, None)
    assert states(document, "megatron") == {"not importable here"}
    assert states(document, "torch") == {"fits"}
    assert document["problems"][0] == (
        "megatron.core: cannot be imported here (SystemExit: out of order): run in the environment that trains"
    )
    assert document["wrong_apex"].startswith(f"apex: {tmp_path}/apex/__init__.py is an unrelated package")


def test_the_table_in_the_repository_is_the_one_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`evenpipe patches --markdown > patches/TABLE.md` after a patch was added or changed."""
    assert main(["patches", "--markdown"]) == 0
    assert capsys.readouterr().out == (ROOT / "patches" / "TABLE.md").read_text()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the installed sources of megatron-core."""
    installed = Path(pytest.importorskip("megatron.core").__file__).parents[1]
    skipped = shutil.ignore_patterns("__pycache__", "*.so")
    return Path(shutil.copytree(installed, tmp_path / "copy" / "megatron", ignore=skipped)).parent


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def check(capsys: pytest.CaptureFixture[str], path: Path, *flags: str) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as wide:
        wide.setenv("COLUMNS", "300")
        status = main(["patches", "--check", str(path), *flags])
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, captured.out


def test_a_supported_folder(copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    status, text = check(capsys, copy)
    assert status == 0
    first, *lines = text.splitlines()
    assert first.endswith(f" in {copy}: supported")
    [row] = [line for line in lines if "schedules:get_forward_backward_func" in line]
    assert row.split()[:2] == ["fits", "schedule"]
    assert "called for training" in lines
    if not (copy / "megatron" / "training").is_dir():
        assert lines[-1].startswith("absent: megatron.training, which only scripts of Megatron-LM need")


def test_a_folder_that_is_not_supported(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each misfit, which names the symbol, what was found and what was expected."""
    parallel = copy / "megatron" / "core" / "pipeline_parallel"
    edit(parallel / "schedules.py", "def get_schedule_table(num_microbatches,", "def get_schedule_table(batches,")
    edit(parallel / "p2p_communication.py", "def _p2p_ops(", "def _p2p_operations(")
    status, text = check(capsys, copy)
    assert status == 1
    assert text.splitlines()[0].endswith(": not supported")
    schedule, cpu_mode = [line for line in text.splitlines() if "use an unmodified supported release" in line]
    assert schedule.startswith("megatron.core.pipeline_parallel.schedules:get_schedule_table: megatron-core ")
    assert "has signature (batches, num_model_chunks," in schedule
    assert "expected (num_microbatches, num_model_chunks," in schedule
    assert cpu_mode.startswith("CPU mode: megatron.core.pipeline_parallel.p2p_communication:_p2p_ops: ")

    status, text = check(capsys, copy, "--json")
    document = json.loads(text)
    assert (status, document["supported"], document["path"]) == (1, False, str(copy))
    assert document["problems"] == [schedule]
    assert [f"CPU mode: {line}" for line in document["cpu_mode_problems"]] == [cpu_mode]
    assert sorted({each["state"] for each in document["symbols"]} - {"absent"}) == ["does not fit", "fits"]


def test_a_release_that_is_not_known_gives_one_line(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    version = copy / "megatron" / "core" / "package_info.py"
    version.write_text("MAJOR = 0\nMINOR = 13\nPATCH = 1\nPRE_RELEASE = ''\n")
    status, text = check(capsys, copy)
    assert status == 1
    first, blank, line = text.splitlines()
    assert (first, blank) == (f"megatron-core 0.13.1 in {copy}: not supported", "")
    assert line.startswith("megatron-core 0.13.1: unknown release, expected one of 0.14, ")


def test_no_deepspeed_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert main(["patches"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "deepspeed: not installed here"


def test_a_folder_with_deepspeed_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here one that EvenPipe does not know, as a checkout states it."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").touch()
    (tmp_path / "setup.py").touch()
    (tmp_path / "version.txt").write_text("0.18.9\n")
    status, text = check(capsys, tmp_path)
    assert status == 1
    first, blank, line = text.splitlines()
    assert (first, blank) == (f"deepspeed 0.18.9 in {tmp_path}: not supported", "")
    assert line.startswith("deepspeed 0.18.9: unknown release, expected one of 0.19.4, ")
    _, text = check(capsys, tmp_path, "--json")
    assert json.loads(text)["deepspeed"]["problems"] == [line]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--check", "{folder}/nowhere"], "--check {folder}/nowhere: there is no such folder"),
        (
            ["--check", "{folder}"],
            "--check {folder}: has neither megatron/core/package_info.py nor deepspeed/__init__.py: name a checkout",
        ),
        (["--check", "{folder}", "--markdown"], "leave out --check"),
        (["--json", "--markdown"], "not allowed with argument --json"),
    ],
)
def test_bad_input(flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "patches", *(flag.format(folder=tmp_path) for flag in flags))
    assert said.format(folder=tmp_path) in line
