"""A recipe: what is trained where, by which run, and how it is started."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from evenpipe.descriptions import Cluster, Model
from evenpipe.descriptions import framework as described_framework
from evenpipe.planner.arguments import Values, parse_flags
from evenpipe.planner.estimate import Estimate, Estimator
from evenpipe.planner.features import features_of
from evenpipe.planner.run import Run
from evenpipe.planner.search.plan import Plan, PlannedRun
from evenpipe.wording.nearest import nearest
from evenpipe.wording.validation import first_message, plain_message

__all__ = [
    "FORMAT",
    "FRAMEWORKS",
    "LAUNCHERS",
    "MOCK",
    "Framework",
    "Launcher",
    "Recipe",
    "RecipeError",
    "Settings",
    "read_plan",
    "recipe_of_plan",
    "run_of_plan",
    "series",
]


class RecipeError(ValueError):
    """The recipe cannot be: a combination that does not exist, or a value that no file of it can carry."""


#: `data=mock`: random tokens in place of files.
MOCK: Final = "mock"
_HOST: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*", re.ASCII)
_RELEASE: Final = re.compile(r"0\.[1-9][0-9]*", re.ASCII)


def _text(value: str) -> str:
    if not value:
        raise ValueError("is empty: give a value, or leave it out")
    if "\0" in value or value != value.encode(errors="replace").decode():
        raise ValueError("is no text that a file can hold (NUL, or bytes that are not UTF-8): choose another")
    return value


def _hosts(value: str) -> str:
    hosts = value.split(",")
    for host in hosts:
        if hosts.count(host) > 1:
            raise ValueError(f"{host!r} is named {hosts.count(host)} times: name each node once")
        if not _HOST.fullmatch(host):
            raise ValueError(f"{host!r} is no host name: give names or addresses, separated by commas")
    return value


def _release(value: str) -> str:
    if not _RELEASE.fullmatch(value):
        raise ValueError("is no release: give one such as 0.16")
    return value


Text = Annotated[str, AfterValidator(_text)]


class Settings(BaseModel):
    """Left out, a path or a name is one that the files' first lines ask to be changed.

    Descriptions are what `evenpipe recipe --help` prints.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Text | None = Field(None, description="of the job (default: the model's)")
    data: Text | None = Field(None, description="prefix of the token files; mock: random tokens")
    tokenizer: Text | None = Field(None, description="folder of the tokenizer; of BERT: the vocabulary's file")
    checkpoints: Text | None = Field(None, description="folder, on a file system that all nodes see")
    megatron_lm: Text = Field("/opt/Megatron-LM", description="the checkout on every node")
    release: Annotated[str, AfterValidator(_release)] = Field("0.16", description="of Megatron-LM")
    hosts: Annotated[str, AfterValidator(_hosts)] | None = Field(None, description="one a node, separated by commas")
    master_port: int = Field(29500, ge=1024, le=65535, description="of node 0")
    interface: Text | None = Field(None, description="network interface between nodes, where there are several")
    partition: Text | None = Field(None, description="of Slurm")
    account: Text | None = Field(None, description="of Slurm")
    time: Text | None = Field(None, description="limit of Slurm, such as 24:00:00")
    image: Text = Field("nvcr.io/nvidia/pytorch:25.09-py3", description="of Kubernetes, with EvenPipe in it")
    namespace: Text | None = Field(None, description="of Kubernetes")
    claim: Text | None = Field(
        None, description="PersistentVolumeClaim with data and checkpoints (default: the job's name)"
    )
    mount: Text = Field("/data", description="where Kubernetes mounts the claim")
    train_iters: int = Field(500_000, ge=1, description="iterations")
    lr: float = Field(1.5e-4, gt=0, description="highest learning rate")
    weight_decay: float = Field(0.1, ge=0)
    clip_grad: float = Field(1.0, ge=0)
    seed: int = Field(1234, ge=1)
    log_interval: int = Field(10, ge=1, description="iterations")
    save_interval: int = Field(1000, ge=1, description="iterations")
    eval_interval: int = Field(1000, ge=1, description="iterations")
    eval_iters: int = Field(10, ge=1)

    @property
    def warmup_iters(self) -> int:
        return min(2000, self.train_iters // 10)

    @classmethod
    def of(cls, assignments: Iterable[str]) -> Settings:
        """From `key=value`s. Raises RecipeError, one line, for the first that is none."""
        given: dict[str, str] = {}
        for one in assignments:
            key, sign, value = one.partition("=")
            if not sign or not key:
                raise RecipeError(f"--set {one}: give key=value, such as data=/data/tokens")
            if key not in cls.model_fields:
                raise RecipeError(f"--set {key}: there is no such setting, {nearest(key, cls.model_fields)}")
            given[key] = value
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            raise RecipeError(f"--set {first['loc'][0]}={first['input']!r}: {plain_message(first)}") from None


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
        # How messages travel, and memory is reserved, is what today's framework does; EvenPipe's are not waited for.
        of_today = ("hand_over_us", "divided_messages", "overlap_collectives", "expandable_segments")
        today: dict[str, Any] = dict.fromkeys(of_today)
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
        """Return the estimate of the emitted run. Raises EstimateError for a run that cannot be."""
        return self.estimator(self.run)

    @property
    def name(self) -> str:
        return self.settings.name or self.slug

    @property
    def title(self) -> str:
        framework, launcher = FRAMEWORKS[self.framework], LAUNCHERS[self.launcher]
        release = f" {self.settings.release}" if self.framework == "megatron" else ""
        return f"{self.model.name} on {self.cluster.name}: {framework}{release} with EvenPipe, started by {launcher}."

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
        """Return the document ``evenpipe.recipe/1``: what a recipe that was edited is compared with."""
        settings = self.settings.model_dump(include={"release"})
        of_unlike = {"groups": (), "slowness": 1.0}
        usual = {name for name, value in of_unlike.items() if getattr(self.cluster, name) == value}
        return {
            "format": FORMAT,
            "framework": self.framework,
            "launcher": self.launcher,
            "release": settings["release"],
            "model": self.model.model_dump(mode="json", exclude_defaults=True),
            "cluster": self.cluster.model_dump(mode="json", exclude=usual),
        }


def recipe_of_plan(path: Path) -> list[str] | None:
    """Return the words after ``evenpipe recipe`` of the plan's own command; None where it has none.

    Raises RecipeError, one line that names the file.
    """
    for command in _plan_of(path).commands:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise RecipeError(f"--plan {path}: commands: {error}: plan anew") from None
        if words[:2] == ["evenpipe", "recipe"]:
            return words[2:]
    return None


def read_plan(path: Path, model: Model, cluster: str) -> Plan:
    """For that model, with its sequence, and that cluster. Raises RecipeError, one line that names the file."""
    plan = _plan_of(path)
    named = {
        "model": (plan.model, model.name),
        "seq-length": (plan.seq_length, model.sequence),
        "cluster": (plan.cluster, cluster),
    }
    for what, (of, asked) in named.items():
        if of != asked:
            raise RecipeError(f"--plan {path}: is for --{what} {of}, not {asked}: plan anew, or give that {what}")
    return plan


def _plan_of(path: Path) -> Plan:
    try:
        plan = Plan.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise RecipeError(f"--plan {path}: cannot be read: {reason}") from None
    except ValidationError as error:
        said = first_message(error, "document")
        raise RecipeError(f"--plan {path}: no plan that `evenpipe plan --out` wrote: {said}") from None
    if not plan.plans:
        raise RecipeError(f"--plan {path}: has no plans: plan anew, with --top 1 or more")
    return plan


def run_of_plan(one: PlannedRun) -> Run:
    """Return what a plan says of a run; precision, attention and gradients only where they were asked for."""
    words = one.flags.split()
    asked: dict[str, Any] = {
        name: words[words.index(f"--{name}") + 1] for name in ("precision", "attention") if f"--{name}" in words
    }
    if in_fp32 := {"--gradients-in-fp32", "--no-gradients-in-fp32"} & {*words}:
        asked["gradients_in_fp32"] = in_fp32 == {"--gradients-in-fp32"}
    return Run(
        global_batch=one.global_batch_size,
        tensor=one.tensor_parallel,
        stages=one.stages,
        data=one.data_parallel,
        context=one.context_parallel,
        expert=one.expert_parallel,
        expert_tensor=one.expert_tensor_parallel,
        chunks=one.chunks,
        micro_batch=one.micro_batch_size,
        recompute=one.recompute,
        schedule=one.schedule,
        bpipe=one.bpipe,
        group_size=one.group_size,
        layout=one.layout,
        further_part=one.further_part,
        placement=one.placement,
        **features_of(Values(parse_flags(words)[0])),
        **asked,
    )
