"""Under CPU mode unmodified megatron-core trains on gloo, and afterwards nothing is left of it."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.tensor_parallel import random

from evenpipe.megatron.cpu_mode import cpu_mode
from evenpipe.upstream import FITS, PatchSet, UpstreamError
from evenpipe.upstream.symbols import locate
from tests import forked
from tests.reports import MEGATRON

WORKER = Path(__file__).with_name("train_tiny_gpt.py")

needs_cpu_only_machine = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA")


@pytest.fixture
def mode() -> Iterator[PatchSet]:
    mode = cpu_mode()
    mode.apply()
    yield mode
    mode.revert()


@pytest.fixture(scope="module")
def losses() -> dict[str, list[float]]:
    """What four processes report: per layout the losses of its iterations."""
    run = forked.run(4, MEGATRON, WORKER)
    assert run.returncode == 0, run.stderr
    assert "RNG state changed" not in run.stderr
    report: dict[str, list[float]] = json.loads(run.stdout.splitlines()[-1])
    return report


@needs_cpu_only_machine
def test_the_loss_is_finite_and_falls_in_every_layout(losses: dict[str, list[float]]) -> None:
    for first, second in losses.values():
        assert math.isfinite(first)
        assert second < first


@needs_cpu_only_machine
@pytest.mark.parametrize(
    ("layout", "tolerance"),
    [
        ("TP2 PP2", 1e-5),
        ("TP2 PP2, sequence parallel", 1e-5),
        ("PP4 VPP2", 1e-5),
        ("DP2 PP2, distributed optimizer", 1e-5),
        ("PP4 bf16", 1e-3),
    ],
)
def test_every_layout_trains_the_same_model(losses: dict[str, list[float]], layout: str, tolerance: float) -> None:
    """Interleaved stages overlap their sends: without aliases, gloo sent outputs that Megatron had freed."""
    assert losses[layout] == pytest.approx(losses["PP4"], rel=tolerance)


@needs_cpu_only_machine
def test_recomputation_draws_the_same_dropout_masks(losses: dict[str, list[float]]) -> None:
    dropped = losses["TP2 PP2, dropout"]
    assert losses["TP2 PP2, dropout, recompute"] == pytest.approx(dropped, rel=1e-6)
    assert dropped != pytest.approx(losses["TP2 PP2"], rel=1e-4)


@needs_cpu_only_machine
def test_revert_restores_every_original() -> None:
    mode = cpu_mode()
    targets = [target for patch in mode.list() for target in patch.targets]
    before = [locate(target).value for target in targets]
    mode.apply()
    assert all(locate(target).value is not original for target, original in zip(targets, before, strict=True))
    mode.revert()
    assert [locate(target).value for target in targets] == before
    assert not {"to", "cuda", "type"} & vars(torch.Tensor).keys()
    assert {state.state for state in cpu_mode().check()} == {FITS}


def test_nothing_changes_before_apply() -> None:
    before = torch.Tensor.to
    cpu_mode()
    assert torch.Tensor.to == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_a_machine_with_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UpstreamError, match=r"^cpu-mode: CUDA is available here"):
        cpu_mode().apply()
    assert torch.zeros(1).type() == "torch.FloatTensor"


@needs_cpu_only_machine
def test_whatever_is_asked_of_cuda_happens_on_the_cpu(mode: PatchSet) -> None:
    tensor = torch.ones(2, device="cuda")
    assert tensor.device.type == "cpu"
    assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
    assert tensor.cuda() is tensor
    assert tensor.to("cuda:0", torch.float64).dtype is torch.float64
    assert tensor.to(device=torch.device("cuda")).device.type == "cpu"
    assert torch.nn.Linear(1, 1).cuda().weight.device.type == "cpu"
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["reserved_bytes.all.current"] == 0


@needs_cpu_only_machine
def test_type_names_say_cuda_in_both_directions(mode: PatchSet) -> None:
    half = torch.ones(1).type("torch.cuda.HalfTensor")
    assert half.dtype is torch.float16
    assert half.type() == "torch.cuda.HalfTensor"
    assert half.type(torch.float32).dtype is torch.float32


@needs_cpu_only_machine
def test_streams_are_there_and_do_nothing(mode: PatchSet) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.ones(1).item() == 1
    torch.cuda.default_stream().wait_stream(side)
    side.record_event().synchronize()


@needs_cpu_only_machine
def test_the_cuda_random_state_is_the_cpu_s(mode: PatchSet) -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(1)
    random._set_cuda_rng_state(state)
    assert torch.rand(1) == first
    torch.cuda.set_rng_state(state)
    assert torch.rand(1) == first
    assert torch.rand(1, generator=torch.Generator().manual_seed(7)) == first


def test_nothing_is_compiled_even_where_torch_was_imported_first() -> None:
    """A script that asked for EvenPipe after Megatron once compiled functions, or looked for a C++ compiler."""
    code = """
import os
import torch
import torch._dynamo

def no_compiler(graph, inputs):
    raise SystemExit("compiled")

function = torch.compile(lambda x: 2 * x, backend=no_compiler)
os.environ["EVENPIPE_CPU"] = "1"
import evenpipe.megatron
evenpipe.megatron.install()
assert function(torch.ones(1)) == 2
"""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True)
