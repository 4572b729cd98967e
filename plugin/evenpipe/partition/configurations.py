"""The models of DawnPiper's evaluation (§5.1) by name, and the configurations of those that transformers builds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

__all__ = ["CONFIGURATIONS", "MODELS"]

#: By name, "full" size, and what else is said of a "small" one.
CONFIGURATIONS: Final[Mapping[str, Mapping[str, dict[str, Any]]]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
MODELS: Final = (*CONFIGURATIONS, "amoebanet-d")
