"""Scripts of Megatron-LM on machines without a GPU: their patches, and CPU mode of a process."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any, Final

from evenpipe.megatron.cpu_mode import (
    DATASETS,
    EXPERTS,
    cpu_mode,
    have_dataset_helpers,
    stand_in_for_triton_kernels,
    take_dataset_helpers_from_the_wheel,
    without_transformer_engine,
)
from evenpipe.megatron.supported import core_patch, expected
from evenpipe.megatron.symbols import training_patch
from evenpipe.runtime.processes import rest_at_exit
from evenpipe.upstream import PRESENT, PatchSet
from evenpipe.upstream.ending import apply_or_end, end_job
from evenpipe.upstream.imports import when_imported
from evenpipe.upstream.torch_cuda import no_gpu

__all__ = ["adapt_arguments", "install_cpu_mode", "missing_package", "script_patches"]


_ARGUMENTS = "megatron.training.arguments"
_INITIALIZE = "megatron.training.initialize"
_BERT_LAYERS = "megatron.core.models.bert.bert_layer_specs"


def script_patches(as_given: bool = False) -> dict[str, PatchSet]:
    """By module, what is to be replaced in it before anybody imports names from it; `as_given`: arguments are not."""
    patches = {
        _ARGUMENTS: [
            training_patch(
                "parse_args",
                f"{_ARGUMENTS}:parse_args",
                functools.partial(_adapt, set()),
                "Megatron's defaults name NCCL, Transformer Engine and fused kernels, which need a GPU",
            )
        ],
        _INITIALIZE: [
            training_patch(name, f"{_INITIALIZE}:{name}", call, reason)
            for name, call, reason in (
                ("initialize_megatron", _allow_no_cuda, "Megatron-LM stops where it finds no CUDA device"),
                (
                    "_compile_dependencies",
                    _compile_no_kernels,
                    "Megatron-LM builds CUDA kernels at start, and dataset helpers that its wheel has already",
                ),
                (
                    "set_jit_fusion_options",
                    lambda original, *args, **kwargs: None,
                    "Megatron-LM warms up fused CUDA kernels; on CPU nothing is fused",
                ),
            )
        ],
        _BERT_LAYERS: [
            core_patch(
                "get_bert_layer_with_transformer_engine_spec",
                f"{_BERT_LAYERS}:get_bert_layer_with_transformer_engine_spec",
                lambda original: _local_layers(),
                "pretrain_bert.py imports Transformer Engine's layers by name, whatever --transformer-impl says",
                "()",
            )
        ],
    }
    if as_given:
        del patches[_ARGUMENTS]
    called = {
        _INITIALIZE: expected({"megatron.core.datasets.utils:compile_helpers": PRESENT}),
        _BERT_LAYERS: expected({f"{_BERT_LAYERS}:bert_layer_local_spec": PRESENT}),
    }
    return {
        module: PatchSet(f"cpu-mode {module}", items, called.get(module, ()), guard=no_gpu)
        for module, items in patches.items()
    }


def _adapt(said: set[str], original: Callable[..., Namespace], *args: Any, **kwargs: Any) -> Namespace:
    """`parse_args`, which scripts call up to three times, with arguments for the CPU; what they are is said once."""
    parsed = original(*args, **kwargs)
    missing = missing_package(parsed)
    if missing is not None:
        end_job(missing)
    changed = ", ".join(adapt_arguments(parsed))
    if changed and changed not in said and parsed.rank == 0:
        said.add(changed)
        print(f"evenpipe: CPU mode: {changed}", flush=True)
    return parsed


def _allow_no_cuda(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **{**kwargs, "allow_no_cuda": True})


def _compile_no_kernels(original: Callable[[], None]) -> None:
    """Only the dataset helpers, and these only where they are missing, as Megatron-LM does it: by rank 0."""
    import torch
    from megatron.core.datasets.utils import compile_helpers

    if not have_dataset_helpers():
        if torch.distributed.get_rank() == 0:
            compile_helpers()
        torch.distributed.barrier()


def _local_layers() -> Any:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec

    return bert_layer_local_spec


# By argument: the value that works on CPU, and the flag that gives it. YAML files name the layer norm's the other way.
_VALUES: dict[str, tuple[Any, str]] = {
    "distributed_backend": ("gloo", "--distributed-backend gloo"),
    "transformer_impl": ("local", "--transformer-impl local"),
    "no_persist_layer_norm": (True, "--no-persist-layer-norm"),
    "persist_layer_norm": (False, "--no-persist-layer-norm"),
    "gradient_accumulation_fusion": (False, "--no-gradient-accumulation-fusion"),
    "masked_softmax_fusion": (False, "--no-masked-softmax-fusion"),
    "apply_rope_fusion": (False, "--no-rope-fusion"),
    "cross_entropy_fusion_impl": ("native", "--cross-entropy-fusion-impl native"),
    "moe_grouped_gemm": (False, "without --moe-grouped-gemm"),
    "moe_permute_fusion": (False, "without --moe-permute-fusion"),
    "moe_router_fusion": (False, "without --moe-router-fusion"),
    "fp8": (None, "without --fp8-format"),
    "fp8_param_gather": (False, "without --fp8-param-gather"),
    "fp4": (None, "without --fp4-format"),
    "fp4_param": (False, "without --fp4-param-gather"),
    "fp4_param_gather": (False, "without --fp4-param-gather"),
    "moe_router_padding_for_fp8": (False, "without --moe-router-padding-for-fp8"),
    "moe_router_padding_for_quantization": (False, "without --moe-router-padding-for-quantization"),
}
# Modules that only experts in one product can recompute.
_GROUPED_ONLY: Final = "moe_act"


def adapt_arguments(args: Namespace) -> list[str]:
    """Give `args`, parsed but not validated, values that work on CPU; what was changed, as flags.

    Arguments that a release or a YAML file does not have are left out.
    """
    changed = []
    for settings in _groups(args):
        for name, (value, flag) in _VALUES.items():
            if getattr(settings, name, value) != value:
                setattr(settings, name, value)
                changed.append(flag)
        backend: Any = getattr(settings, "attention_backend", None)
        if getattr(backend, "name", "auto") not in ("auto", "local"):  # those are Transformer Engine's
            settings.attention_backend = type(backend)["auto"]
            changed.append("--attention-backend auto")
        if _GROUPED_ONLY in (modules := getattr(settings, "recompute_modules", None) or ()):
            settings.recompute_modules = [module for module in modules if module != _GROUPED_ONLY]
            changed.append(f"without {_GROUPED_ONLY} in --recompute-modules")
    return changed


def missing_package(args: Namespace) -> str | None:
    """One line when a package is missing without which the run that `args` ask for would hang, else None."""
    saves = getattr(args, "save", None) is not None and getattr(args, "ckpt_format", None) == "torch_dist"
    if saves and importlib.util.find_spec("psutil") is None:
        return (
            "--save with --ckpt-format torch_dist: psutil is not installed, and without it the writing of a checkpoint "
            "never ends: pip install psutil, or use --ckpt-format torch"
        )
    return None


def _groups(args: Namespace) -> Iterator[Any]:
    """The arguments, and the groups of them that a YAML file makes."""
    yield args
    yield from (value for value in vars(args).values() if isinstance(value, SimpleNamespace))


def install_cpu_mode(as_given: bool = False) -> None:
    """Prepare this process for Megatron on CPU: nothing is imported, each patch is applied once its module has been.

    `as_given`: a script's arguments stay what they are on a GPU, since nothing is trained with them.

    What must not be patched, such as a machine with CUDA or an unknown release, ends the job with one line.
    """
    _set_environment(os.environ)
    _compile_nothing(os.environ)
    rest_at_exit()
    stand_in_for_triton_kernels()
    when_imported(DATASETS, take_dataset_helpers_from_the_wheel)
    when_imported(EXPERTS, without_transformer_engine)
    when_imported("megatron.core", functools.partial(apply_or_end, cpu_mode()))
    for module, patches in script_patches(as_given).items():
        when_imported(module, functools.partial(apply_or_end, patches))


def _set_environment(environ: MutableMapping[str, str]) -> None:
    """Set what CPU runs need and the user has not set."""
    # Megatron-LM asks for it with tensor parallelism, whatever the device.
    environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Megatron compiles its small fused functions at their first call: minutes, and a C++ compiler, for nothing on CPU.
    environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    one_machine = environ.get("LOCAL_WORLD_SIZE", "1") == environ.get("WORLD_SIZE", "1")
    if sys.platform == "linux" and one_machine:
        # gloo otherwise listens where the host's name leads, which need not be reachable from the host itself.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _compile_nothing(environ: Mapping[str, str]) -> None:
    """Have torch go by TORCHDYNAMO_DISABLE even where it read that before it was set."""
    if environ.get("TORCHDYNAMO_DISABLE") == "1" and "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.set_stance("force_eager")
