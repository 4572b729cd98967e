"""Runs that are read from files: a configuration that Megatron-Bridge saved, and a folder of `evenpipe recipe`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from evenpipe.fitting.document import FitError
from evenpipe.fitting.source import Source, source_of_line, source_of_settings
from evenpipe.recipes.reading import UNKNOWN, read_folder, read_script
from evenpipe.recipes.recipe import RecipeError

__all__ = ["is_file_of_a_run", "source_of_path"]

#: The name that Bridge gives a run's configuration beside each checkpoint.
_SAVED: Final = "run_config.yaml"
_ENDS: Final = (".yaml", ".yml", ".json")
#: Variables that an answer may change, and that a recipe's script exports.
_VARIABLES: Final = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF")


def is_file_of_a_run(word: str) -> bool:
    """Return whether a word names a configuration, or a folder that is there; a line begins otherwise."""
    return word.endswith(_ENDS) or Path(word).is_dir()


def source_of_path(path: Path, on: str | None, memory_gib: float | None) -> Source:
    """Read a saved configuration, a checkpoint's folder that has one, or a recipe's folder. Raises FitError."""
    if not path.is_dir():
        return source_of_settings(_settings(path), on, memory_gib, path.name)
    if (path / "recipe.json").exists():
        return _source_of_recipe(path, on, memory_gib)
    saved = [path / _SAVED, *sorted(path.glob(f"iter_*/{_SAVED}"), reverse=True)]
    for one in saved:
        if one.exists():
            return source_of_settings(_settings(one), on, memory_gib, one.name)
    raise FitError(
        f"{path}: has neither {_SAVED} nor recipe.json: name a folder that Bridge or `evenpipe recipe` wrote"
    )


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text("utf-8"))  # JSON is YAML
    except (OSError, UnicodeDecodeError) as error:
        raise FitError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'no text'}") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise FitError(f"{path}{where}: is neither YAML nor JSON: {getattr(error, 'problem', error)}") from None
    if not isinstance(found, dict) or not ("model" in found or "num_layers" in found):
        raise FitError(f"{path}: has no section model: name what Megatron-Bridge saves as {_SAVED}")
    return {str(key): value for key, value in found.items()}


def _source_of_recipe(folder: Path, on: str | None, memory_gib: float | None) -> Source:
    """Read a recipe's folder, for the recipe's own cluster unless another is named."""
    try:
        written = read_folder(folder)
        about = written.about
        if about.framework != "megatron":
            raise FitError(
                f"{folder}: is a recipe of {about.framework}: `evenpipe recipe --check {folder}` estimates it"
            )
        script = read_script(written.files["train.sh"], "train.sh")
    except RecipeError as error:
        raise FitError(str(error)) from None
    set_there = [f"{name}={script.variables[name]}" for name in _VARIABLES if name in script.variables]
    words = [*set_there, *(word.replace(UNKNOWN, "?") for word in script.command if word != "exec")]
    return source_of_line(words, on or about.cluster, memory_gib, about.model.vocabulary)
