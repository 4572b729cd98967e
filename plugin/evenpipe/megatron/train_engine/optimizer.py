"""Megatron's optimizer and its schedule of the learning rate, as a run's options say."""

from __future__ import annotations

from typing import Final

from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from evenpipe.megatron.train_engine.models import DTYPES, Replica
from evenpipe.train.options import TrainOptions

__all__ = ["make_optimizer", "make_scheduler"]

_FINAL_LR_FRACTION: Final = 0.1


def make_optimizer(options: TrainOptions, replica: Replica) -> MegatronOptimizer:
    """The optimizer of this process' chunks; the loss is scaled as it wants it."""
    config = OptimizerConfig(
        optimizer=options.optimizer,
        lr=options.lr,
        min_lr=_final_lr(options),
        weight_decay=options.weight_decay,
        sgd_momentum=options.momentum,
        clip_grad=options.clip_grad,
        params_dtype=DTYPES[options.precision],
        bf16=options.precision == "bf16",
        fp16=options.precision == "fp16",
        initial_loss_scale=options.initial_loss_scale,
        # Every overflow halves the scale: a short run cannot afford to lose another step to the same one.
        hysteresis=1,
        use_distributed_optimizer=options.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, replica.chunks)
    replica.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def make_scheduler(options: TrainOptions, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Sets learning rate and weight decay; one step of it before each of the optimizer's.

    In iteration i (from 1) of n the rate is lr · i / warmup up to the end of the warm-up; the cosine then falls to a
    tenth of lr at i = n. A loaded state brings the number of iterations only: the rest is as this run's options say.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=_final_lr(options),
        lr_warmup_steps=options.lr_warmup,
        lr_decay_steps=options.iterations,
        lr_decay_style="constant" if options.lr_decay == "none" else options.lr_decay,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _final_lr(options: TrainOptions) -> float:
    return options.lr * _FINAL_LR_FRACTION
