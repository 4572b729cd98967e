"""The catalogue has all that EvenPipe replaces or relies on in DeepSpeed; a copy that fits is told from its source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import evenpipe
from evenpipe.deepspeed.catalogue import catalogue, examine, look
from evenpipe.deepspeed.supported import RELEASES
from evenpipe.upstream.findings import Purpose, State


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


def test_the_installed_release_fits() -> None:
    found = look()
    if found is None:
        pytest.skip("DeepSpeed is not installed")
    assert found.problems(Purpose.TRAINING) == ()
    assert found.series == found.version
    assert {finding.state for finding in found.findings} == {State.FITS}
    assert {finding.item.symbols for finding in found.findings} == {item.symbols for item in catalogue()}


def test_a_checkout_of_another_release_is_refused_before_anything_else_is_read(tmp_path: Path) -> None:
    """A checkout has its version in a file, which no installation has."""
    (tmp_path / "setup.py").touch()
    (tmp_path / "version.txt").write_text("0.19.3\n")
    found = examine(tmp_path)
    assert (found.supported, found.version, found.findings) == (False, "0.19.3", ())
    [line] = found.problems(Purpose.TRAINING)
    assert line == (f"deepspeed 0.19.3: unknown release, expected one of {', '.join(RELEASES)}: install one of these")
