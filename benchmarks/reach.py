"""How many public pipelined recipes can take each feature in Megatron-LM's scripts with their other flags as they are.

The recipes are Megatron-Bridge's (`published/settings.json`: facts that a script read from their assignments). Each is
given to the checks that a script of Megatron-LM makes when it starts. A V, which a searched order may be, takes two
chunks a stage and no layout of stages that were interleaved. What CUDA graphs of Transformer Engine capture is not
among the facts: graphs are taken to be of attention and router, as Bridge's are for experts.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any, Final

from harness import Benchmark
from rich.table import Table

from evenpipe.megatron_lm.checks import check, stays_stock
from evenpipe.megatron_lm.flags import ArgumentError
from evenpipe.settings.config import EvenPipeConfig

__all__ = ["FEATURES", "arguments_of", "recipes", "refusal"]

_SETTINGS: Final = Path(__file__).parent / "published" / "settings.json"
#: By the flag that asks for it: EvenPipe's settings.
FEATURES: Final[dict[str, dict[str, Any]]] = {
    "--bpipe": {"bpipe": True},
    "--evenpipe-schedule 1f1b": {"schedule": "1f1b"},
    "--evenpipe-schedule dualpipev": {"schedule": "dualpipev"},
    "--evenpipe-schedule v-half": {"schedule": "v-half"},
    "--evenpipe-schedule searched": {"schedule": "searched", "memory_gib": 60.0},
    "--evenpipe auto": {"schedule": "auto", "memory_gib": 60.0},
}
_IN_A_V: Final = ("v-half", "dualpipev", "searched")


def recipes() -> list[dict[str, Any]]:
    """Return the settings of all recipes."""
    found: list[dict[str, Any]] = json.loads(_SETTINGS.read_text())["recipes"]
    return found


def arguments_of(recipe: dict[str, Any], in_a_v: bool) -> Namespace:
    """Return Megatron's arguments of a recipe; GPUs are those of its name."""
    [gpus] = re.findall(r"(\d+)gpu", recipe["recipe"])
    stages, together = recipe["pipeline"], recipe["tensor"] * recipe.get("context", 1)
    layout = None if in_a_v else recipe.get("layout")
    graphs = recipe.get("cuda_graph", "none")
    return Namespace(
        rank=0,
        train_iters=10,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=2 if in_a_v else recipe.get("virtual"),
        pipeline_model_parallel_layout=layout,
        micro_batch_size=recipe["micro_batch"],
        global_batch_size=recipe["global_batch"],
        data_parallel_size=max(1, int(gpus) // (stages * together)),
        rampup_batch_size=None,
        microbatch_group_size_per_vp_stage=stages,
        overlap_moe_expert_parallel_comm=recipe.get("ep_overlap", False),
        delay_wgrad_compute=recipe.get("delay_wgrad", False),
        moe_shared_expert_overlap=recipe.get("shared_expert_overlap", False),
        cuda_graph_impl=graphs,
        cuda_graph_scope=["attn", "moe_router"] if graphs == "transformer_engine" else None,
        fine_grained_activation_offloading=recipe.get("fine_grained_offload", False),
        use_precision_aware_optimizer=recipe.get("precision_aware", False),
        recompute_granularity=recipe.get("recompute"),
        fp8="hybrid" if recipe["precision"].startswith("fp8") else None,
        fp4="e2m1" if recipe["precision"] == "nvfp4" else None,
        num_experts=recipe.get("expert"),
        transformer_impl="transformer_engine",
        optimizer="adam",
        ckpt_format="torch_dist",
        ckpt_convert_format=None,
    )


def refusal(feature: str, recipe: dict[str, Any]) -> str | None:
    """Return the line in which a run of that recipe would refuse the feature, or stay as it is; None if it starts."""
    asked = FEATURES[feature]
    config, args = EvenPipeConfig.of(**asked), arguments_of(recipe, asked.get("schedule") in _IN_A_V)
    try:
        check(config, args)
    except ArgumentError as error:
        return str(error)
    return stays_stock(config, args)


def _setting(line: str) -> str:
    """Return which of Megatron's flags a refusal names."""
    named = re.findall(r"--(?!evenpipe|bpipe)[a-z0-9-]+(?: (?:local|transformer_engine|full_iteration))?", line)
    return next(iter(named), line)


def main() -> None:
    benchmark = Benchmark("reach", __doc__ or "", repeats=1)
    benchmark.parser.parse_args()
    every = recipes()
    results: list[dict[str, Any]] = []
    for feature in FEATURES:
        lines = [refusal(feature, recipe) for recipe in every]
        refused = Counter(_setting(line) for line in lines if line is not None)
        results.append(
            {
                "feature": feature,
                "recipes": len(every),
                "start": lines.count(None),
                "refused": dict(refused.most_common()),
            }
        )
    table = Table("feature", "recipes that start", "the others have", title=f"{len(every)} recipes")
    for row in results:
        others = ", ".join(f"{setting} ({count})" for setting, count in row["refused"].items())
        table.add_row(row["feature"], f"{row['start']} ({row['start'] / len(every):.0%})", others)
    benchmark.report({}, results, table)


if __name__ == "__main__":
    main()
