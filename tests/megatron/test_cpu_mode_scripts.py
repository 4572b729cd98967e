"""CPU mode in processes that have yet to import Megatron: whole scripts, their children, and what is missing there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")

import megatron.core

needs_cpu_only_machine = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA")

KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


def python(*arguments: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=800)


@pytest.mark.long
@needs_cpu_only_machine
def test_a_script_saves_and_resumes_and_its_children_are_in_cpu_mode_too(tmp_path: Path) -> None:
    """torch_dist forks its writers and spawns the manager of their results, which imports the script once more."""
    script = Path(__file__).with_name("save_and_resume.py")
    run = python("-m", "evenpipe", "run", "--cpu", script, FOLDER=str(tmp_path))
    assert run.returncode == 0, run.stderr
    losses = json.loads(run.stdout.splitlines()[-1])
    assert losses["resumed"] == losses["went on"]
    assert len(set(losses["resumed"])) > 1
    assert [child.read_text() for child in tmp_path.glob("__mp_main__ *")] == ["cpu"]


@needs_cpu_only_machine
def test_a_checkout_that_has_compiled_nothing_uses_the_helpers_of_the_wheel(tmp_path: Path) -> None:
    [installed] = megatron.core.__path__
    shutil.copytree(installed, tmp_path / "megatron" / "core", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    code = "import evenpipe.megatron as ours; ours.install(); "
    code += "from megatron.core.datasets import helpers; import megatron.core as core; "
    code += "print(core.__path__[0], helpers.build_sample_idx_int32.__module__)"
    run = python("-c", code, EVENPIPE_CPU="1", PYTHONPATH=str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(tmp_path / "megatron" / "core"), "megatron.core.datasets.helpers_cpp"]


def test_a_stand_in_for_triton_s_kernels_raises_when_it_is_called() -> None:
    code = "import sys; sys.modules['triton'] = None; import importlib.util as u; find = u.find_spec; "
    code += "u.find_spec = lambda name, *more: None if name == 'triton' else find(name, *more); "
    code += "from evenpipe.megatron.cpu_mode import stand_in_for_triton_kernels as stand_in; stand_in(); "
    code += f"from {KERNELS} import enable_batch_invariant_mode; print('imported', flush=True); "
    code += "enable_batch_invariant_mode()"
    run = python("-c", code)
    assert run.stdout == "imported\n"
    assert f"ImportError: {KERNELS}.enable_batch_invariant_mode needs triton" in run.stderr


def test_switching_it_on_imports_neither_torch_nor_megatron() -> None:
    code = "import sys, evenpipe.megatron as ours; ours.install(); "
    code += "print('torch' in sys.modules, 'megatron.core' in sys.modules)"
    run = python("-c", code, EVENPIPE_CPU="1")
    assert run.stdout == "False False\n"


@pytest.mark.parametrize(("local", "interface"), [("2", "lo"), ("1", "")])
@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface has this name on Linux")
def test_gloo_stays_on_the_machine_only_where_all_processes_do(local: str, interface: str) -> None:
    code = "import os, evenpipe.megatron as ours; ours.install(); "
    code += "print(os.environ.get('GLOO_SOCKET_IFNAME', ''))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **{name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"},
            "EVENPIPE_CPU": "1",
            "LOCAL_WORLD_SIZE": local,
            "WORLD_SIZE": "2",
        },
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == interface


@needs_cpu_only_machine
@pytest.mark.parametrize("how", [f"import {KERNELS}", "import torch; assert False, 'Megatron requires CUDA.'"])
def test_what_misses_a_gpu_is_told_of_cpu_mode_in_one_line(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(f"{how}\n")
    run = python("-m", "evenpipe", "run", tmp_path / "train.py")
    assert run.returncode == 2
    [line] = run.stderr.splitlines()
    assert line.startswith("evenpipe: error: ")
    assert line.endswith(f"this machine has no GPU: put --cpu before {tmp_path}/train.py, to try it on CPU")
