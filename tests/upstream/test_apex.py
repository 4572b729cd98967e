"""The unrelated apex of the registry, and a mere folder of that name, are told from NVIDIA Apex."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenpipe.upstream.installed import wrong_apex

#: The files of each package, as far as they tell them apart: of apex 0.9.10.dev0 on PyPI, of NVIDIA Apex built without
#: its extensions, and of a checkout of NVIDIA Apex seen from the folder above it.
REGISTRY = ("__init__.py", "decorators.py", "lib/__init__.py", "ext/__init__.py")
NVIDIA = ("__init__.py", "optimizers/__init__.py", "normalization/__init__.py", "multi_tensor_apply/__init__.py")
CHECKOUT = ("setup.py", "apex/__init__.py", "apex/optimizers/__init__.py")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that imports look into first."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(folder: Path, files: tuple[str, ...]) -> None:
    for name in files:
        file = folder / "apex" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise SystemExit('nothing is to be imported')\n")


def test_without_apex_there_is_nothing_to_say(path: Path) -> None:
    assert wrong_apex() is None


def test_nvidia_apex_is_right_with_or_without_its_extensions(path: Path) -> None:
    write(path, NVIDIA)
    assert wrong_apex() is None


def test_the_package_of_the_registry_is_named_with_what_to_do(path: Path) -> None:
    write(path, REGISTRY)
    line = wrong_apex()
    assert line is not None
    assert line.startswith(f"apex: {path}/apex/__init__.py is an unrelated package, not NVIDIA Apex")
    assert "pip uninstall apex" in line
    assert "github.com/NVIDIA/apex" in line
    assert "\n" not in line


def test_a_checkout_of_apex_beside_the_script_is_named_with_what_to_do(path: Path) -> None:
    """Python takes any folder for a package; uninstalling would not help."""
    write(path, CHECKOUT)
    line = wrong_apex()
    assert line is not None
    assert line.startswith(f"apex: the folder {path}/apex is found in place of NVIDIA Apex")
    assert "pip" not in line


def test_an_installed_nvidia_apex_comes_before_a_mere_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path / "installed", NVIDIA)
    monkeypatch.syspath_prepend(path / "installed")
    write(path, CHECKOUT)
    monkeypatch.syspath_prepend(path)
    assert wrong_apex() is None


MEGATRON = """
import json
from megatron.core.models.backends import LNImpl
from megatron.core.optimizer import Adam
from megatron.core.transformer import TransformerConfig
config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
try:
    LNImpl(config, 8)
    error = None
except ValueError as raised:
    error = str(raised)
print(json.dumps([LNImpl.__name__, Adam.__module__.partition(".")[0], error]))
"""


@pytest.mark.gate
def test_megatron_takes_a_mere_folder_for_apex(tmp_path: Path) -> None:
    """What the line says of it."""
    pytest.importorskip("megatron.core")
    write(tmp_path, CHECKOUT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEGATRON],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [
        "FusedLayerNorm",
        "torch",
        "Apex must be installed to use FusedLayerNorm.",
    ]
