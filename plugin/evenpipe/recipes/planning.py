"""The run of a recipe: that of a plan, or the best of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from evenpipe.planner.run import Run
from evenpipe.planner.search.plan import Plan, PlannedRun
from evenpipe.recipes.errors import RecipeError

__all__ = ["read_plan", "run_of_plan"]


def read_plan(path: Path, model: str, cluster: str) -> Plan:
    """For that model and cluster. Raises RecipeError, one line that names the file."""
    try:
        plan = Plan.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise RecipeError(f"--plan {path}: cannot be read: {reason}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "document"
        raise RecipeError(f"--plan {path}: no plan that `evenpipe plan --out` wrote: {where}: {first['msg']}") from None
    if not plan.plans:
        raise RecipeError(f"--plan {path}: has no plans: plan anew, with --top 1 or more")
    for what, of, asked in (("model", plan.model, model), ("cluster", plan.cluster, cluster)):
        if of != asked:
            raise RecipeError(f"--plan {path}: is for --{what} {of}, not {asked}: plan anew, or name that {what}")
    return plan


def run_of_plan(one: PlannedRun) -> Run:
    """What a plan says of a run; precision and attention only where they were asked for."""
    words = one.flags.split()
    asked: dict[str, Any] = {
        name: words[words.index(f"--{name}") + 1] for name in ("precision", "attention") if f"--{name}" in words
    }
    return Run(
        global_batch=one.global_batch_size,
        tensor=one.tensor_parallel,
        stages=one.stages,
        data=one.data_parallel,
        context=one.context_parallel,
        expert=one.expert_parallel,
        chunks=one.chunks,
        micro_batch=one.micro_batch_size,
        recompute=one.recompute,
        schedule=one.schedule,
        bpipe=one.bpipe,
        group_size=one.group_size,
        layout=one.layout,
        placement=one.placement,
        **asked,
    )
