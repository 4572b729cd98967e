"""What tests of the planner's search ask it."""

from __future__ import annotations

from evenpipe.cli.plan import engine_of
from evenpipe.descriptions import cluster, framework, model
from evenpipe.planner.estimate import framework_of
from evenpipe.planner.run import Run
from evenpipe.planner.search.question import Engine, Question, weighed

__all__ = ["ALL", "MEGATRON", "MEGATRON_TODAY", "SMALL", "asked_as_published"]

MEGATRON = Engine("Megatron", frozenset(["chunks", "groups", "stream"]), uneven=False, context=False)
MEGATRON_TODAY = engine_of(framework("megatron"))
ALL = Engine("all", frozenset(["chunks", "groups", "stream", "split", "vee"]))
SMALL = Question(model("gpt3-13b"), cluster("1x8-a100-80gb"), 8, MEGATRON, ("1f1b", "interleaved", "gpipe"))


def asked_as_published(name: str, nodes: str, samples: int) -> Question:
    """Return the question of a recipe with bf16 weights and gradients."""
    of, where = model(name), cluster(nodes)
    named = framework_of(of, where)
    asked = Run(global_batch=1, gradients_in_fp32=False)
    return Question(of, where, samples, engine_of(named), weighed(), named, asked)
