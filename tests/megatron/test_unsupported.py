"""What EvenPipe's schedules cannot honour is refused before a batch, in one line that names the setting."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from evenpipe.megatron.supported import installed_release
from evenpipe.megatron.unsupported import refuse_unsupported, refused_settings
from evenpipe.upstream import PatchSet
from evenpipe.upstream.saved_leaves import keeping_identity

PLAIN = SimpleNamespace(ddp_config=DistributedDataParallelConfig())
ALWAYS: list[tuple[str, Any]] = [
    ("enable_cuda_graph", True),
    ("cuda_graph_impl", "local"),
    ("cuda_graph_impl", "full_iteration"),
    ("fine_grained_activation_offloading", True),
    ("moe_paged_stash", True),
]
WITH_BPIPE: list[tuple[str, Any]] = [
    ("cpu_offloading", True),
    ("distribute_saved_activations", True),
    ("external_cuda_graph", True),
    ("cuda_graph_impl", "transformer_engine"),
]
FIRST_SERIES = {"cuda_graph_impl": "0.15", "fine_grained_activation_offloading": "0.16", "moe_paged_stash": "0.18"}


@pytest.fixture(autouse=True)
def patches() -> Iterator[PatchSet]:
    """Those under which anything may be recorded."""
    patches = PatchSet("saved tensors", [keeping_identity()])
    patches.apply()
    yield patches
    patches.revert()


def config(**settings: Any) -> TransformerConfig:
    """A real configuration; `settings` are set afterwards, because they would ask for others."""
    made = TransformerConfig(
        num_layers=8,
        hidden_size=16,
        num_attention_heads=2,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=settings.pop("virtual", None),
        pipeline_dtype="float32",
    )
    for name, value in settings.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("bpipe", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_megatrons_defaults_pass(bpipe: bool, chunks: int) -> None:
    refuse_unsupported(config(virtual=chunks if chunks > 1 else None), bpipe, [PLAIN] * chunks, bpipe)


@pytest.mark.parametrize("bpipe", [False, True])
@pytest.mark.parametrize(("setting", "value"), ALWAYS)
def test_a_setting_that_breaks_the_schedule_is_refused(setting: str, value: object, bpipe: bool) -> None:
    with pytest.raises(ValueError, match=rf"^{setting}\b.*: (turn it off|set it to none)") as refusal:
        refuse_unsupported(config(**{setting: value}), bpipe, [PLAIN], bpipe)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("setting", "value"), WITH_BPIPE)
def test_a_setting_that_breaks_only_bpipe_is_refused_with_bpipe_only(setting: str, value: object) -> None:
    refuse_unsupported(config(**{setting: value}), False, [PLAIN], False)
    with pytest.raises(ValueError, match=rf"^{setting}\b.*, or (turn it or BPipe off|BPipe)$") as refusal:
        refuse_unsupported(config(**{setting: value}), True, [PLAIN], True)
    assert "\n" not in str(refusal.value)


def test_swaps_are_refused_with_what_else_moves_activations_and_with_combined_steps() -> None:
    for setting, value in WITH_BPIPE:
        [refusal] = refused_settings(config(**{setting: value}), False, swaps=True)
        assert refusal.remedy.endswith("swaps off") or refusal.remedy == "turn it off, or swaps"
    combined = SimpleNamespace(overlap_moe_expert_parallel_comm=True)
    assert [*refused_settings(combined, True)] == []
    [refusal] = refused_settings(combined, True, swaps=True)
    assert str(refusal) == (
        "overlap_moe_expert_parallel_comm computes a forward and a backward together, between which a swap would "
        "start: turn it off, or swaps"
    )


def test_graphs_of_parts_have_another_name_in_newer_releases() -> None:
    graphs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": None}
    parts = [SimpleNamespace(name="attn"), SimpleNamespace(name="moe_router")]
    assert [*refused_settings(SimpleNamespace(**graphs, cuda_graph_modules=parts), True)] == []
    [_] = refused_settings(SimpleNamespace(**graphs, cuda_graph_modules=[]), True)


@pytest.mark.parametrize(("experts", "scope"), [(None, ["attn", "mlp"]), (8, ["attn", "moe"])])
def test_graphs_of_both_parts_of_a_layer_are_of_the_whole(experts: int | None, scope: list[str]) -> None:
    graphs = {"cuda_graph_impl": "transformer_engine", "num_moe_experts": experts}
    members = [SimpleNamespace(name=one) for one in scope]
    for given in (scope, members):
        [refusal] = refused_settings(SimpleNamespace(**graphs, cuda_graph_scope=given), True)
        assert "of whole layers" in refusal.reason
    for part in scope:
        assert [*refused_settings(SimpleNamespace(**graphs, cuda_graph_scope=[part]), True)] == []


@pytest.mark.parametrize("scope", ["attn", ["attn", "moe_router"]])
def test_graphs_of_parts_of_layers_go_with_bpipe(scope: str | list[str]) -> None:
    for graphs in ({"cuda_graph_impl": "transformer_engine"}, {"external_cuda_graph": True}):
        assert [*refused_settings(SimpleNamespace(**graphs, cuda_graph_scope=scope), True)] == []
        for whole in ({}, {"cuda_graph_scope": []}, {"cuda_graph_scope": "full"}):
            [refusal] = refused_settings(SimpleNamespace(**graphs, **whole), True)
            assert "of whole layers" in refusal.reason


def test_what_puts_off_or_captures_backwards_goes_with_whole_ones_only() -> None:
    deferred = config(defer_embedding_wgrad_compute=True, gradient_accumulation_fusion=True)
    refuse_unsupported(deferred, False, [PLAIN], False)
    with pytest.raises(ValueError, match=r"^defer_embedding_wgrad_compute puts off .*: turn it off, or use 1f1b$"):
        refuse_unsupported(deferred, False, [PLAIN], False, halves=True)


def test_nothing_is_recorded_without_the_patches(patches: PatchSet) -> None:
    """Recorded weights would lose fused gradients, and recomputed regions those of their inputs, without a word."""
    patches.revert()
    refuse_unsupported(config(), False, [PLAIN], False)
    for bpipe in (False, True):
        with pytest.raises(ValueError, match=r"^activations are recorded .*: apply in_place_of_megatron"):
            refuse_unsupported(config(), bpipe, [PLAIN], True)


def test_parameters_that_come_and_go_are_refused() -> None:
    sharded = SimpleNamespace(ddp_config=DistributedDataParallelConfig(use_megatron_fsdp=True))
    with pytest.raises(ValueError, match=r"^use_megatron_fsdp .*: turn it off, or EvenPipe's schedule$"):
        refuse_unsupported(config(), False, [PLAIN, sharded], False)
    arguments = config(use_megatron_fsdp=True)
    assert [refusal.setting for refusal in refused_settings(arguments, False)] == ["use_megatron_fsdp"]


def test_experts_whose_sizes_vary_go_with_bpipe() -> None:
    refuse_unsupported(config(num_moe_experts=4), True, [PLAIN], True)


def test_every_refused_setting_is_one_of_megatrons() -> None:
    series = installed_release().series
    for setting, _ in (*ALWAYS, *WITH_BPIPE):
        assert hasattr(config(), setting) == (series >= FIRST_SERIES.get(setting, "0.14")), setting
