"""2bw with layers of `deepspeed.moe`: the bits of DeepSpeed's own engine, which follows the same rule by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenpipe.deepspeed.section import SectionError
from tests.deepspeed.job import run_cases
from tests.selected import marked, selected

pytest.importorskip("deepspeed")
from deepspeed.moe.layer import MoE
from torch import nn

from evenpipe.deepspeed.unsupported import refuse_for_two_bw

_ZERO = {"zero_optimization": {"stage": 1}}
_BF16 = {"bf16": {"enabled": True}}
_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
_CLIPPED = {"gradient_clipping": 0.5}
# DeepSpeed's own engine scales no losses in fp16 without ZeRO.
_FP16 = {"fp16": {"enabled": True, "loss_scale": 1}}

_RUNS: dict[str, dict[str, Any]] = {
    "fp32": {"config": {}, "folder": "fp32"},
    "fp32, every replica has all": {"config": {}, "ep_size": 1},
    "bf16": {"config": _BF16},
    "bf16, clipped": {"config": {**_BF16, **_CLIPPED}},
    "bf16, ZeRO, sums in fp32": {"config": {**_BF16, **_ZERO, **_IN_FP32}, "folder": "bf16"},
    "ZeRO, an overflow": {"config": _ZERO, "broken": 1},
    "bf16, an overflow": {"config": _BF16, "broken": 1},
    "ZeRO, clipped": {"config": {**_ZERO, **_CLIPPED}},
    "fp16, ZeRO": {"config": {**_ZERO, "fp16": {"enabled": True, "loss_scale": 128}}},
    "fp16": {"config": _FP16},
    "fp16, fused": {"config": _FP16, "fused": True},
    # Without a checkpoint: DeepSpeed writes too few files of these.
    "bf16, model-parallel, clipped": {"config": {**_BF16, **_CLIPPED}, "model_parallel": True},
    "fp32, model-parallel": {"config": {}, "model_parallel": True},
    "bf16, model-parallel, every rank has all": {"config": _BF16, "model_parallel": True, "ep_size": 1},
}
_LONG = {
    "bf16, model-parallel, every rank has all",
    "bf16, clipped",
    "fp32, every replica has all",
    "bf16",
    "ZeRO, an overflow",
    "fp16, ZeRO",
}
# DeepSpeed adds the squares up in fp32, where 2bw does in doubles.
_ROUNDED = {name for name in _RUNS if "clipped" in name}
# 2bw's norm with these optimizers, which have none of all stages and all experts, is that of another run's.
_NORMS_OF = {"fp32, clipped": "ZeRO, clipped", "fp16": "fp16, fused"}
_OTHERS: dict[str, dict[str, Any]] = {
    "fp32, clipped": {"config": _CLIPPED},
    "on the first stage only": {"config": {}, "only_first": True},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the runs that are looked at found, in one job of four processes: two stages, two replicas, four experts."""
    names = selected(request, "name", others=_RUNS.keys() - _LONG | _OTHERS.keys())
    return _trained(
        "train_experts.py",
        {name: run for name, run in {**_RUNS, **_OTHERS}.items() if name in names},
        tmp_path_factory.mktemp("experts"),
    )


def _trained(script: str, runs: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    placed = [
        {"steps": 4, **run, **({"folder": str(folder / run["folder"])} if "folder" in run else {})}
        for run in runs.values()
    ]
    return dict(zip(runs, run_cases(script, placed, folder)[0], strict=True))


@pytest.mark.parametrize("name", marked(_RUNS, _LONG))
def test_losses_and_weights_are_those_of_deepspeeds_engine_by_the_rule(results: dict[str, Any], name: str) -> None:
    for rank in results[name]:
        _compare(rank["two_bw"], rank["by_hand"], rounded=name in _ROUNDED)
        assert rank["two_bw"]["skipped"] == int("broken" in _RUNS[name])
        if name not in _NORMS_OF and rank["by_hand"]["norms"][0] is not None:
            assert rank["two_bw"]["norms"] == pytest.approx(rank["by_hand"]["norms"], rel=1e-6)


@pytest.mark.parametrize("name", _NORMS_OF)
def test_the_norm_counts_every_expert_once_with_every_optimizer(results: dict[str, Any], name: str) -> None:
    known = results[_NORMS_OF[name]][0]["by_hand"]["norms"]
    for rank in results[name]:
        assert rank["two_bw"]["norms"] == pytest.approx(known, rel=1e-5)


@pytest.mark.gate
def test_replicas_that_have_the_same_experts_go_on_alike(tmp_path: Path) -> None:
    runs = {name: _RUNS[name] for name in ("fp32", "bf16, ZeRO, sums in fp32")}
    for ranks in _trained("train_experts_on_eight.py", runs, tmp_path).values():
        for rank in ranks:
            _compare(rank["two_bw"], rank["by_hand"], rounded=False)


def _compare(found: dict[str, Any], wanted: dict[str, Any], rounded: bool) -> None:
    if rounded:
        assert list(map(float.fromhex, found["losses"])) == pytest.approx(
            list(map(float.fromhex, wanted["losses"])), rel=1e-6
        )
        assert found["sizes"] == pytest.approx(wanted["sizes"], rel=1e-6)
        return
    assert found["losses"] == wanted["losses"]
    assert found["weights"] == wanted["weights"]
    if "resumed" in found:
        assert found["resumed"]["losses"] == wanted["losses"][-2:]
        assert found["resumed"]["weights"] == wanted["weights"]


def test_a_stage_without_experts_is_refused_before_deepspeed_waits_for_it(results: dict[str, Any]) -> None:
    said = [rank["refused"] for rank in results["on the first stage only"]]
    assert "layers of experts (stage 0 ep_size_2, stage 1 none): DeepSpeed waits forever" in said[0]
    assert said[1:] == [None] * 3


def test_experts_beside_model_parallelism_are_refused_with_the_optimizer_whose_norm_leaves_some_out() -> None:
    engine = _engine(cut=False)
    with pytest.raises(
        SectionError, match=r"^evenpipe\.schedule: a topology with model parallelism is, .* but the first"
    ):
        refuse_for_two_bw(engine, SimpleNamespace(sharded=True))
    refuse_for_two_bw(engine, SimpleNamespace(sharded=False))


def test_experts_that_are_cut_among_model_parallel_ranks_are_refused() -> None:
    """Their ranks have parts of one expert, and not experts of their own or copies."""
    with pytest.raises(SectionError, match=r"^evenpipe\.schedule: MoE\(enable_expert_tensor_parallelism=True\) is, "):
        refuse_for_two_bw(_engine(cut=True), SimpleNamespace(sharded=False))
    refuse_for_two_bw(_engine(cut=True, is_model_parallel=False), SimpleNamespace(sharded=False))


def _engine(cut: bool, is_model_parallel: bool = True) -> SimpleNamespace:
    experts = MoE(4, nn.Linear(4, 4), num_experts=2, enable_expert_tensor_parallelism=cut)
    module = nn.Sequential(nn.Linear(4, 4), experts)
    return SimpleNamespace(is_model_parallel=is_model_parallel, has_moe_layers=True, optimizer=None, module=module)
