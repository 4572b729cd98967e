"""Flags of Megatron's that have an effect only beside others, and what Megatron does with them alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml
from jinja2 import Environment, StrictUndefined

from evenpipe.descriptions import Model
from evenpipe.planner.run import EstimateError, Run

__all__ = ["Given", "Need", "needs", "without_effect"]

_OTHERWISE: Final = {
    "refused": "Megatron refuses it",
    "ignored": "Megatron ignores it",
    "uncounted": "this estimate does not count it",
}


class Given(NamedTuple):
    """``names``: options that were given, without dashes. ``value``: gives an argument by name, or a default.

    refusing: by a framework that refuses as Megatron does.
    """

    names: Collection[str]
    value: Callable[[str, Any], Any]
    model: Model
    run: Run
    refusing: bool = True


class Need(NamedTuple):
    """One option of an entry of ``flag_needs.yaml``, which says what its fields are."""

    option: str
    when: str
    otherwise: str
    expression: Callable[..., Any]
    sizes: bool = False

    @property
    def line(self) -> str:
        what = _OTHERWISE[self.otherwise]
        return f"--{self.option}: works only {self.when}; {what} here: leave it out, or change that"

    def met(self, given: Given) -> bool:
        modules = given.run.recomputed_modules if given.run.recompute == "selective" else ()
        value = {"given": lambda name: given.value(name, None), "modules": modules}
        return bool(self.expression(model=given.model, run=given.run, **value))


@cache
def needs() -> tuple[Need, ...]:
    """Return what each option needs, in the order of the file."""
    compiled = Environment(undefined=StrictUndefined).compile_expression
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    found: list[Need] = []
    for row in rows:
        options, met = row.pop("options"), compiled(row.pop("met"), False)
        found += [Need(option, expression=met, **row) for option in options]
    return tuple(found)


def without_effect(given: Given, searched: bool = False) -> list[str]:
    """Return a line for each option that has no effect. ``searched``: a search chooses the sizes.

    Raises EstimateError, one line, for one that Megatron refuses.
    """
    lines = []
    for need in needs():
        if need.option.partition(" ")[0] not in given.names or (need.sizes and searched) or need.met(given):
            continue
        if need.otherwise != "refused":
            lines.append(need.line)
        elif given.refusing:
            raise EstimateError(need.line)
    return lines
