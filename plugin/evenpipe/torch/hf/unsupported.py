"""Settings of `TrainingArguments` that a pipeline would pass over."""

from __future__ import annotations

from typing import Any, Final

from evenpipe.partition.models import ModelError

__all__ = ["refuse_unsupported"]

#: Schedules of the learning rate that need no metric.
_BY_STEPS: Final = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"),
)
#: Settings of `TrainingArguments` that would change the run, the values with which they do not, and what to do.
_UNSUPPORTED: Final[tuple[tuple[str, tuple[Any, ...], str], ...]] = (
    ("fp16_full_eval", (False,), "leave it out: an evaluation computes as the training does"),
    ("bf16_full_eval", (False,), "leave it out: an evaluation computes as the training does"),
    ("include_for_metrics", ([],), "leave it out: compute_metrics gets predictions and labels"),
    ("gradient_checkpointing", (False,), 'give optimize="recompute", which recomputes what a stage has no room for'),
    ("activation_checkpointing", (False,), 'give optimize="recompute"'),
    ("deepspeed", (None,), "use evenpipe.deepspeed"),
    ("fsdp", (None, False, "", []), "leave it out: a pipeline shards the model already"),
    ("optim", ("adamw_torch", "adamw_torch_fused"), "give optimizer=, a function of parameter groups"),
    ("label_smoothing_factor", (0.0, 0), "leave it out: the model computes its loss"),
    ("neftune_noise_alpha", (None,), "leave it out"),
    ("train_sampling_strategy", ("random", "sequential"), "use random or sequential"),
    ("save_strategy", ("no", "steps", "epoch"), "use steps or epoch"),
    ("restore_callback_states_from_checkpoint", (False,), "leave it out: callbacks begin anew"),
    ("load_best_model_at_end", (False,), "leave it out"),
    ("lr_scheduler_type", _BY_STEPS, "use one that goes by steps, such as cosine"),
    ("auto_find_batch_size", (False,), "set per_device_train_batch_size and gradient_accumulation_steps"),
    ("eval_on_start", (False,), "call evaluate() before train()"),
    ("ignore_data_skip", (False,), "leave it out: skipping batches takes no time here"),
    ("save_only_model", (False,), "leave it out, or call save_model()"),
    ("push_to_hub", (False,), "upload the folder that save_model() wrote"),
    ("full_determinism", (False,), "call transformers.enable_full_determinism before"),
    ("torch_compile", (False,), "leave it out: stages are generated code"),
    ("use_liger_kernel", (False,), "leave it out"),
)


def refuse_unsupported(args: Any, own_optimizer: bool) -> None:
    """Raise ModelError, one line, for a setting that would change the run; `optim` counts where there is no own."""
    for name, known, remedy in _UNSUPPORTED:
        given = getattr(args, name, known[0])
        if given not in known and not (name == "optim" and own_optimizer):
            raise ModelError(f"{name}={getattr(given, 'value', given)}: the pipeline does not do that: {remedy}")
