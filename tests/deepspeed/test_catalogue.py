"""The catalogue has all that EvenPipe replaces or relies on in DeepSpeed; a copy that fits is told from its source."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import evenpipe
from evenpipe.deepspeed.catalogue import catalogue, examine, installed_in, look
from evenpipe.deepspeed.supported import RELEASES
from evenpipe.upstream.findings import Purpose, State

ENGINE = "runtime/pipe/engine.py"


def test_it_is_listed_without_deepspeed() -> None:
    code = """
import sys
from evenpipe.deepspeed.catalogue import catalogue, look
assert len(catalogue()) > 20
look()
assert not [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_patch_set_of_the_room_is_in_it() -> None:
    rooms = [Path(evenpipe.__file__).parent / name for name in ("deepspeed", "two_bw")]
    made = {
        ast.unparse(call.args[0])
        for room in rooms
        for path in room.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "PatchSet"
    }
    assert made == {repr(item.owner) for item in catalogue() if item.is_replaced}


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str, str, str], Path]:
    """A copy of the installed sources of DeepSpeed, with one text in one file replaced."""
    installed = installed_in()
    if installed is None:
        pytest.skip("DeepSpeed is not installed")

    def edited(file: str, old: str, new: str) -> Path:
        skipped = shutil.ignore_patterns("__pycache__", "*.so", "ops", "inference", "autotuning")
        shutil.copytree(installed / "deepspeed", tmp_path / "deepspeed", ignore=skipped)
        path = tmp_path / "deepspeed" / file
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        return tmp_path

    return edited


def test_the_installed_release_fits() -> None:
    found = look()
    if found is None:
        pytest.skip("DeepSpeed is not installed")
    assert found.problems(Purpose.TRAINING) == ()
    assert found.series == found.version
    assert {finding.state for finding in found.findings} == {State.FITS}
    assert {finding.item.symbols for finding in found.findings} == {item.symbols for item in catalogue()}


def test_a_changed_signature_is_named_with_what_was_found_and_expected(copy: Callable[..., Path]) -> None:
    found = examine(copy(ENGINE, "def _exec_schedule(self, pipe_schedule)", "def _exec_schedule(self, sched)"))
    assert not found.supported
    [line] = found.problems(Purpose.TRAINING)
    assert line == (
        f"deepspeed.runtime.pipe.engine:PipelineEngine._exec_schedule: deepspeed {found.version} has signature "
        "(self, sched), expected (self, pipe_schedule): use an unmodified supported release"
    )


def test_a_lost_symbol_is_named(copy: Callable[..., Path]) -> None:
    [line] = examine(copy(ENGINE, "    _INSTRUCTION_MAP = {", "    _MAP = {")).problems(Purpose.TRAINING)
    assert line.startswith("deepspeed.runtime.pipe.engine:PipelineEngine._INSTRUCTION_MAP: ")


def test_a_checkout_of_another_release_is_refused_before_anything_else_is_read(tmp_path: Path) -> None:
    """A checkout has its version in a file, which no installation has."""
    (tmp_path / "setup.py").touch()
    (tmp_path / "version.txt").write_text("0.19.3\n")
    found = examine(tmp_path)
    assert (found.supported, found.version, found.findings) == (False, "0.19.3", ())
    [line] = found.problems(Purpose.TRAINING)
    assert line == (f"deepspeed 0.19.3: unknown release, expected one of {', '.join(RELEASES)}: install one of these")
