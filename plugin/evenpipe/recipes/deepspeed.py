"""DeepSpeed's configuration, with EvenPipe's section, and the flags of the training script that comes with it."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any, Final

from evenpipe.planner.descriptions import Model
from evenpipe.planner.run import Run
from evenpipe.recipes.flags import Flag, Group, Variable, lines
from evenpipe.recipes.recipe import Recipe
from evenpipe.recipes.rendering import verbatim

__all__ = ["CONFIGURATION", "boundaries_of", "configuration_of", "flag_groups", "training_files"]

CONFIGURATION: Final = "ds_config.json"
#: What model.py has before the model's layers, and behind them: words and positions, norm and logits.
_ENDS: Final = 2


def training_files(recipe: Recipe) -> dict[str, str]:
    """The configuration, and the scripts that it is for."""
    scripts = {name: verbatim(name) for name in ("train.py", "model.py", "data.py")}
    return {**scripts, CONFIGURATION: _written(configuration_of(recipe))}


def _written(configuration: dict[str, Any]) -> str:
    """JSON, with lists of numbers on a line each."""
    text = json.dumps(configuration, indent=2)
    return re.sub(r"\[[\d.,\s]+\]", lambda found: json.dumps(json.loads(found[0])), text) + "\n"


def flag_groups(recipe: Recipe) -> list[Group]:
    """Of train.py."""
    run, given = recipe.run, recipe.settings
    files = lines(
        [
            [Flag("mock") if recipe.mock else Flag("data", Variable("DATA"))],
            [Flag("checkpoints", Variable("CHECKPOINTS")), Flag("save-interval", given.save_interval)],
            [Flag("deepspeed_config", CONFIGURATION)],
        ]
    )
    training = lines([[Flag("iterations", given.train_iters), Flag("seed", given.seed)]])
    pipeline = lines([[Flag("stages", run.stages), run.recompute == "full" and Flag("recompute")]])
    return [
        Group("MODEL", "The model.", _model(recipe.model)),
        Group("PIPELINE", f"The pipeline: its batch, schedule and layers are in {CONFIGURATION}.", pipeline),
        Group("TRAINING", f"Yours: how it is trained; the optimizer is in {CONFIGURATION}.", training),
        Group("FILES", "What is read and written.", files),
    ]


def _model(model: Model) -> Any:
    head = model.head_dim != model.hidden // model.heads
    grouped = model.key_value_heads != model.heads
    return lines(
        [
            [Flag("layers", model.layers), Flag("hidden", model.hidden), Flag("ffn", model.ffn)],
            [
                Flag("heads", model.heads),
                grouped and Flag("key-value-heads", model.key_value_heads),
                head and Flag("head-dim", model.head_dim),
            ],
            [Flag("sequence", model.sequence), Flag("vocabulary", model.vocabulary)],
            [
                not model.causal and Flag("masked"),
                model.gated and Flag("gated"),
                model.norm == "rms" and Flag("rms-norm"),
                model.positions == "rotary" and Flag("rotary"),
                not model.biases and Flag("no-biases"),
                not model.tied and Flag("untied"),
                not model.dropout and Flag("dropout", 0),
            ],
        ]
    )


def boundaries_of(model: Model, run: Run) -> list[int]:
    """The layers of model.py at which stages begin, and their number."""
    each = list(run.layers_of(model))
    each[0] += _ENDS
    each[-1] += _ENDS
    return [0, *accumulate(each)]


def configuration_of(recipe: Recipe) -> dict[str, Any]:
    """What `deepspeed.initialize` is given."""
    run, given = recipe.run, recipe.settings
    section: dict[str, Any] = {"schedule": run.spec.name}
    if run.group_size > 1:
        section["group_size"] = run.group_size
    if run.bpipe:
        section["bpipe"] = True
    section["partition"] = boundaries_of(recipe.model, run)
    found: dict[str, Any] = {
        "train_batch_size": run.global_batch,
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": run.micro_batches,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": given.lr, "betas": [0.9, 0.95], "weight_decay": given.weight_decay, "torch_adam": True},
        },
        "gradient_clipping": given.clip_grad,
        "steps_per_print": given.log_interval,
    }
    if given.warmup_iters:
        found["scheduler"] = {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": given.train_iters,
                "warmup_num_steps": given.warmup_iters,
                "cos_min_ratio": 0.1,
            },
        }
    if run.precision == "bf16":
        found["bf16"] = {"enabled": True}
    if run.precision == "fp16":
        found["fp16"] = {"enabled": True}
    if run.sharded_optimizer:
        found["zero_optimization"] = {"stage": 1}
    return {**found, "evenpipe": section}
