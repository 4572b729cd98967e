"""The patches for those who keep a Megatron-LM of their own: they apply to the release's file, and it trains."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from evenpipe.megatron_lm.catalogue import examine
from tests.megatron_lm.launch import gpt_flags, start, torchrun

pytestmark = pytest.mark.every_release

PATCHES = Path(__file__).resolve().parent.parent.parent / "patches"
PATCHED = Path("megatron", "training", "__init__.py")
TOOLS = {"git": ["git", "apply", "--unidiff-zero"], "patch": ["patch", "--silent", "-p1", "-i"]}


@pytest.fixture
def copy(megatron_lm: Path, tmp_path: Path) -> Path:
    """Of the checkout, without its history."""
    return Path(shutil.copytree(megatron_lm, tmp_path / megatron_lm.name, ignore=shutil.ignore_patterns(".git")))


def patch_for(checkout: Path) -> Path:
    return PATCHES / f"megatron-lm-{examine(checkout).series}.patch"


@pytest.mark.parametrize("tool", TOOLS)
def test_the_patch_adds_two_lines_before_every_import_and_can_be_taken_back(copy: Path, tool: str) -> None:
    before = (copy / PATCHED).read_text()
    # git would otherwise look for a repository around the copy, and skip what lies outside of it.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}
    command = [*TOOLS[tool], str(patch_for(copy))]
    subprocess.run(command, cwd=copy, env=environment, check=True)
    after = (copy / PATCHED).read_text()
    first_import = before.index("import ")
    ours = "import evenpipe.megatron\nevenpipe.megatron.install()\n"
    assert after == before[:first_import] + ours + before[first_import:]
    subprocess.run([*command[:2], "-R", *command[2:]], cwd=copy, env=environment, check=True)
    assert (copy / PATCHED).read_text() == before


def test_a_patched_copy_is_supported_and_trains_with_evenpipe_s_flags(copy: Path, tmp_path: Path) -> None:
    """Started as ever: nothing on the command line but Megatron's flags and EvenPipe's; saving spawns processes."""
    subprocess.run(["patch", "--silent", "-p1", "-i", str(patch_for(copy))], cwd=copy, check=True)
    assert examine(copy).supported
    flags = [*gpt_flags(2), "--pipeline-model-parallel-size", "2", "--bpipe"]
    flags += ["--save", str(tmp_path / "saved"), "--save-interval", "2", "--ckpt-format", "torch_dist"]
    job = start([*torchrun(2), "pretrain_gpt.py", *flags], copy, {"EVENPIPE_CPU": "1"})
    output, _ = job.communicate(timeout=800)
    assert job.returncode == 0, output[-6000:]
    assert "[evenpipe] iteration 2 | peak live: " in output
    assert any((tmp_path / "saved" / "iter_0000002").glob("*.distcp"))
