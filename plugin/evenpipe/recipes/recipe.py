"""A recipe: which model is trained where and how, by what, started by what."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Final, Literal

from evenpipe.planner.descriptions import Cluster, Model
from evenpipe.planner.descriptions import framework as described_framework
from evenpipe.planner.estimate import Estimate, Estimator
from evenpipe.planner.run import Run
from evenpipe.recipes.settings import MOCK, Settings

__all__ = ["FORMAT", "FRAMEWORKS", "LAUNCHERS", "Framework", "Launcher", "Recipe", "series"]

Framework = Literal["megatron", "deepspeed"]
Launcher = Literal["torchrun", "slurm", "deepspeed", "kubernetes"]
FORMAT: Final = "evenpipe.recipe/1"
#: By what they are called in text.
FRAMEWORKS: Final[Mapping[Framework, str]] = MappingProxyType({"megatron": "Megatron-LM", "deepspeed": "DeepSpeed"})
LAUNCHERS: Final[Mapping[Launcher, str]] = MappingProxyType(
    {"torchrun": "torchrun", "slurm": "Slurm", "deepspeed": "DeepSpeed's launcher", "kubernetes": "Kubernetes"}
)


def series(release: str) -> tuple[int, ...]:
    """0.16 as numbers, which compare."""
    return tuple(map(int, release.split(".")))


@dataclass(frozen=True)
class Recipe:
    """``run`` says everything itself: what a framework of the planner's would do by default is filled in."""

    model: Model
    cluster: Cluster
    run: Run
    framework: Framework
    launcher: Launcher
    settings: Settings

    @classmethod
    def of(
        cls,
        model: Model,
        cluster: Cluster,
        run: Run,
        framework: Framework,
        launcher: Launcher,
        settings: Settings,
        planned_for: str | None = None,
    ) -> Recipe:
        """``planned_for``: the framework whose defaults the run has, which may be one of a paper's years."""
        filled = run.of(described_framework(planned_for or framework))
        # How messages travel is what today's framework does; EvenPipe's are not waited for.
        today: dict[str, Any] = {"hand_over_us": None, "divided_messages": None, "overlap_collectives": None}
        one_queue = described_framework(framework).one_queue
        filled = replace(filled, **today, blocking=() if run.stages > 1 else None, one_queue=one_queue)
        if filled.schedule == "2bw":
            filled = replace(filled, overlap_parameters=False)  # refused: the forward runs on the weights before
        if framework == "deepspeed":
            # model.py asks torch for attention, which keeps no scores in half precision.
            filled = replace(filled, overlap_parameters=False, overlap_gradients=False, attention="flash")
        if filled.precision == "fp32":
            filled = replace(filled, attention="unfused")  # no flash attention computes in it
        return cls(model, cluster, filled, framework, launcher, settings)

    @property
    def kind(self) -> Literal["gpt", "bert"]:
        return "gpt" if self.model.causal else "bert"

    @cached_property
    def estimator(self) -> Estimator:
        return Estimator(self.model, self.cluster, described_framework(self.framework))

    @cached_property
    def estimate(self) -> Estimate:
        """Of the emitted run. Raises EstimateError for one that cannot be."""
        return self.estimator(self.run)

    @property
    def name(self) -> str:
        return self.settings.name or self.slug

    @property
    def slug(self) -> str:
        """The model's name in lower-case letters, digits and dashes."""
        return re.sub(r"[^a-z0-9]+", "-", self.model.name.lower())[:40].strip("-") or self.kind

    @property
    def mock(self) -> bool:
        return self.settings.data == MOCK

    @property
    def root(self) -> str:
        """Where data and checkpoints are, if nothing is said."""
        return self.settings.mount if self.launcher == "kubernetes" else "/data"

    @property
    def data(self) -> str:
        return self.settings.data or str(PurePosixPath(self.root, "tokens_text_document"))

    @property
    def tokenizer(self) -> str:
        default = "tokenizer" if self.kind == "gpt" else "vocab.txt"
        return self.settings.tokenizer or str(PurePosixPath(self.root, default))

    @property
    def checkpoints(self) -> str:
        return self.settings.checkpoints or str(PurePosixPath(self.root, "checkpoints", self.slug))

    @property
    def megatron_lm(self) -> str:
        """A folder that no command takes for a flag."""
        path = self.settings.megatron_lm
        return f"./{path}" if path.startswith("-") else path

    @property
    def hosts(self) -> list[str]:
        """One a node."""
        if self.settings.hosts:
            return self.settings.hosts.split(",")
        return [f"node{number}" for number in range(self.cluster.nodes)]

    def to_json(self) -> dict[str, Any]:
        """The document ``evenpipe.recipe/1``: what a recipe that was edited is compared with."""
        settings = self.settings.model_dump(include={"release"})
        return {
            "format": FORMAT,
            "framework": self.framework,
            "launcher": self.launcher,
            "release": settings["release"],
            "model": self.model.model_dump(mode="json", exclude_defaults=True),
            "cluster": self.cluster.model_dump(mode="json"),
        }
