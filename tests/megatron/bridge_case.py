"""A tiny GPT trained on CPU by Megatron-Bridge's own `pretrain`, under Megatron's schedule or the callback's.

A rank of a torchrun job. Argument: a JSON object with `evenpipe` (arguments of the callback; null: without it), `out`
(rank r writes its losses, weights and what it has seen to <out>/<r>.json) and optionally `chunks`.
Bridge asserts CUDA and imports Transformer Engine by name: CPU mode, and modules that refuse to be used, stand in.
"""

import builtins
import hashlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import torch

from evenpipe.megatron_lm.cpu_scripts import install_cpu_mode

install_cpu_mode()

import megatron.core  # noqa: E402
import megatron.core.extensions.transformer_engine  # noqa: E402  # finds that it is not there, before it is stood in for
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402


class Absent(torch.nn.Module):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("Transformer Engine is not here")


class StandIn(types.ModuleType):
    """Has every name of Transformer Engine that Bridge's modules mention when they are imported."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(name) if name in ("pytorch", "ops", "debug", "optimizers") else type(name, (Absent,), {})


imported = builtins.__import__


def importing(name: str, globals: Any = None, *more: Any, **others: Any) -> Any:
    if name.split(".")[0] == "transformer_engine" and (globals or {}).get("__name__", "").startswith("megatron.bridge"):
        if "optimizers" in name:
            raise ImportError(name)  # these have a substitute
        return StandIn(name)
    return imported(name, globals, *more, **others)


builtins.__import__ = importing  # type: ignore[assignment]

from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec  # noqa: E402
from megatron.bridge.training import initialize  # noqa: E402
from megatron.bridge.training.callbacks import Callback  # noqa: E402
from megatron.bridge.training.config import (  # noqa: E402
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RerunStateMachineConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step  # noqa: E402
from megatron.bridge.training.pretrain import pretrain  # noqa: E402

ITERATIONS = 3


def configuration(chunks: int | None) -> ConfigContainer:
    return ConfigContainer(
        model=GPTModelProvider(
            num_layers=8,
            hidden_size=32,
            num_attention_heads=4,
            seq_length=16,
            vocab_size=128,
            pipeline_model_parallel_size=4,
            virtual_pipeline_model_parallel_size=chunks,
            pipeline_dtype=torch.float32,
            params_dtype=torch.float32,
            bf16=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            transformer_layer_spec=local_layer_spec,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            cross_entropy_loss_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
            attention_softmax_in_fp32=True,
        ),
        train=TrainingConfig(
            train_iters=ITERATIONS, eval_interval=100, eval_iters=1, global_batch_size=8, micro_batch_size=1
        ),
        optimizer=OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4, bf16=False, use_distributed_optimizer=False),
        scheduler=SchedulerConfig(
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            lr_decay_style="constant",
            lr_warmup_iters=0,
            lr_decay_iters=ITERATIONS,
        ),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=False, average_in_collective=False),
        dataset=MockGPTDatasetConfig(
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=16,
            num_dataset_builder_threads=1,
            data_sharding=True,
            dataloader_type="single",
            num_workers=0,
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=128),
        checkpoint=CheckpointConfig(save=None),
        rng=RNGConfig(seed=1234),
        dist=DistributedInitConfig(distributed_backend="gloo"),
        rerun_state_machine=RerunStateMachineConfig(rerun_mode="disabled"),
    )


class Recorder(Callback):
    """Bridge's own kind of callback, beside ours."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.weights = ""

    def on_train_step_end(self, context: Any) -> None:
        self.losses += [float(loss).hex() for loss in (context.loss_dict or {}).values()]

    def on_train_end(self, context: Any) -> None:
        seen = hashlib.sha256()
        for chunk in context.model:
            for name, parameter in sorted(chunk.named_parameters()):
                seen.update(name.encode() + parameter.detach().numpy().tobytes())
        self.weights = seen.hexdigest()


def main(given: dict[str, Any]) -> None:
    checked = initialize.initialize_megatron
    from megatron.bridge.training import setup

    setup.initialize_megatron = lambda *args, **kwargs: checked(*args, **{**kwargs, "allow_no_cuda": True})
    initialize.compile_helpers = lambda: None  # the wheel of megatron-core has them compiled
    initialize._warmup_jit_function = lambda *_: None  # kernels of CUDA, as set_jit_fusion_options's
    recorder = Recorder()
    callbacks: list[Any] = [recorder]
    found: dict[str, Any] = {}
    if given["evenpipe"] is not None:
        from evenpipe.megatron.bridge import EvenPipe

        ours = EvenPipe(**given["evenpipe"])
        callbacks.append(ours)
        trains = ours.schedule._train

        def counted(**arguments: Any) -> Any:
            found["batches"] = found.get("batches", 0) + 1
            return trains(**arguments)

        ours.schedule._train = counted  # type: ignore[method-assign]
    try:
        pretrain(configuration(given.get("chunks")), forward_step, callbacks=callbacks)
    except ValueError as error:
        found["refused"] = str(error)
    found |= {"losses": recorder.losses, "weights": recorder.weights, "core": megatron.core.__version__}
    rank = int(os.environ["RANK"])
    Path(given["out"], f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
