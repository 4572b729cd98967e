"""A recipe's folder as it is now: what recipe.json says it is for, and its files, edited or not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from evenpipe.planner.descriptions import Cluster, Model
from evenpipe.recipes.deepspeed import CONFIGURATION
from evenpipe.recipes.errors import RecipeError
from evenpipe.recipes.recipe import Framework, Launcher

__all__ = ["About", "Written", "read_folder"]

_JOB: Final = "job.yaml"


class About(BaseModel):
    """``recipe.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["evenpipe.recipe/1"]
    framework: Framework
    launcher: Launcher
    release: str
    model: Model
    cluster: Cluster


@dataclass(frozen=True)
class Written:
    """``files``: texts by name, those that a job's ConfigMap has among them; ``job``: the PyTorchJob, if it is one."""

    about: About
    files: Mapping[str, str]
    job: Any = None

    @property
    def configuration(self) -> Any:
        """DeepSpeed's. Raises RecipeError where it is no JSON."""
        try:
            return json.loads(self.files[CONFIGURATION])
        except json.JSONDecodeError as error:
            raise RecipeError(f"{CONFIGURATION}:{error.lineno}: is no JSON: {error.msg}: correct it") from None


def read_folder(folder: Path) -> Written:
    """Raises RecipeError, one line that names the file, for one that is missing or cannot be read."""
    try:
        about = About.model_validate_json(_read(folder / "recipe.json"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "document"
        raise RecipeError(
            f"{folder / 'recipe.json'}: not as `evenpipe recipe` wrote it: {where}: {first['msg']}"
        ) from None
    needed = ["train.sh"] + [CONFIGURATION] * (about.framework == "deepspeed")
    if about.launcher != "kubernetes":
        needed += {"slurm": ["launch.sbatch"], "deepspeed": ["launch.sh"]}.get(about.launcher, [])
        files = {name: _read(folder / name) for name in needed}
        hosts = folder / "hostfile"
        return Written(about, files | ({"hostfile": _read(hosts)} if hosts.exists() else {}))
    return _in_a_job(about, _read(folder / _JOB), needed)


def _in_a_job(about: About, text: str, needed: list[str]) -> Written:
    try:
        documents = [one for one in yaml.safe_load_all(text) if isinstance(one, dict)]
    except RecursionError:
        raise RecipeError(f"{_JOB}: is nested too deeply: correct it") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise RecipeError(f"{_JOB}{line}: is no YAML: {getattr(error, 'problem', error)}: correct it") from None
    kinds = {str(one.get("kind")): one for one in documents}
    said = (kinds.get("ConfigMap") or {}).get("data")
    files = said if isinstance(said, dict) else {}
    for name in needed:
        if not isinstance(files.get(name), str):
            raise RecipeError(f"{_JOB}: its ConfigMap has no {name}: keep what `evenpipe recipe` wrote")
    if "PyTorchJob" not in kinds:
        raise RecipeError(f"{_JOB}: has no PyTorchJob: keep what `evenpipe recipe` wrote")
    return Written(about, files, kinds["PyTorchJob"])


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise RecipeError(f"{path}: cannot be read: {reason}: name the folder that `evenpipe recipe` wrote") from None
