"""CPU mode changes the arguments that need a GPU, says which, and leaves the others alone."""

import importlib.util
from argparse import Namespace
from types import SimpleNamespace

import pytest
from megatron.core.transformer.enums import AttnBackend

from evenpipe.megatron_lm.cpu_scripts import adapt_arguments, missing_package


def test_megatron_s_defaults_are_changed_and_named() -> None:
    args = Namespace(
        distributed_backend="nccl",
        transformer_impl="transformer_engine",
        no_persist_layer_norm=False,
        gradient_accumulation_fusion=True,
        masked_softmax_fusion=True,
        apply_rope_fusion=True,
        bf16=True,
    )
    assert adapt_arguments(args) == [
        "--distributed-backend gloo",
        "--transformer-impl local",
        "--no-persist-layer-norm",
        "--no-gradient-accumulation-fusion",
        "--no-masked-softmax-fusion",
        "--no-rope-fusion",
    ]
    assert vars(args) == {
        "distributed_backend": "gloo",
        "transformer_impl": "local",
        "no_persist_layer_norm": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "bf16": True,
    }


def test_what_suits_a_cpu_is_not_mentioned_and_what_is_absent_not_added() -> None:
    args = Namespace(distributed_backend="gloo", gradient_accumulation_fusion=False)
    assert adapt_arguments(args) == []
    assert vars(args) == {"distributed_backend": "gloo", "gradient_accumulation_fusion": False}


def test_groups_of_a_yaml_file_are_changed_too() -> None:
    args = Namespace(
        distributed_backend="nccl",
        model_parallel=SimpleNamespace(gradient_accumulation_fusion=True),
        language_model=SimpleNamespace(persist_layer_norm=True, num_layers=4),
    )
    changed = adapt_arguments(args)
    assert changed == ["--distributed-backend gloo", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm"]
    assert args.model_parallel.gradient_accumulation_fusion is False
    assert vars(args.language_model) == {"persist_layer_norm": False, "num_layers": 4}


@pytest.mark.parametrize(
    ("save", "ckpt_format", "refused"),
    [("out", "torch_dist", True), ("out", "torch", False), (None, "torch_dist", False)],
)
def test_saving_that_would_hang_without_psutil_is_refused(
    monkeypatch: pytest.MonkeyPatch, save: str | None, ckpt_format: str, refused: bool
) -> None:
    args = Namespace(save=save, ckpt_format=ckpt_format)
    assert missing_package(args) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = missing_package(args)
    assert (line is not None) is refused
    assert line is None or ("psutil" in line and "--ckpt-format torch_dist" in line and "\n" not in line)


def test_attention_of_transformer_engine_is_left_to_local_layers() -> None:
    """BERT's model refuses any other with them."""
    args = Namespace(attention_backend=AttnBackend.unfused)
    assert adapt_arguments(args) == ["--attention-backend auto"]
    assert args.attention_backend is AttnBackend.auto
    assert adapt_arguments(Namespace(attention_backend=AttnBackend.local)) == []


def test_what_only_a_gpu_computes_is_turned_off_and_named() -> None:
    args = Namespace(
        cross_entropy_fusion_impl="te",
        moe_grouped_gemm=True,
        moe_permute_fusion=False,
        fp8="hybrid",
        fp8_param_gather=True,
        fp4=None,
        recompute_modules=["core_attn", "moe_act"],
    )
    assert adapt_arguments(args) == [
        "--cross-entropy-fusion-impl native",
        "without --moe-grouped-gemm",
        "without --fp8-format",
        "without --fp8-param-gather",
        "without moe_act in --recompute-modules",
    ]
    assert args == Namespace(
        cross_entropy_fusion_impl="native",
        moe_grouped_gemm=False,
        moe_permute_fusion=False,
        fp8=None,
        fp8_param_gather=False,
        fp4=None,
        recompute_modules=["core_attn"],
    )
