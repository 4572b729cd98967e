"""What a recipe is told beside the plan: `--set key=value`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from evenpipe.recipes.errors import RecipeError

__all__ = ["MOCK", "Settings"]

#: `data=mock`: random tokens in place of files.
MOCK: Final = "mock"
_HOST: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*", re.ASCII)
_RELEASE: Final = re.compile(r"0\.[1-9][0-9]*", re.ASCII)


def _text(value: str) -> str:
    if not value:
        raise ValueError("is empty: give a value, or leave it out")
    if "\0" in value or not _encodes(value):
        raise ValueError("is no text that a file can hold (NUL, or bytes that are not UTF-8): choose another")
    return value


def _encodes(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


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
            if not sign:
                raise RecipeError(f"--set {one}: give key=value, such as data=/data/tokens")
            if key not in cls.model_fields:
                raise RecipeError(f"--set {key}: there is no such setting, but {', '.join(cls.model_fields)}")
            given[key] = value
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            said = first["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
            raise RecipeError(f"--set {first['loc'][0]}={first['input']!r}: {said}") from None
