"""Training for a command: its flags, progress on standard error, and a failure's one line as the last."""

from __future__ import annotations

import sys
from argparse import SUPPRESS, Namespace, _ArgumentGroup
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from evenpipe.cli.parser import RunFailed, UsageError, add_schedule
from evenpipe.cli.progress import progress
from evenpipe.settings.spelling import command_flag
from evenpipe.train.engines import ENGINES
from evenpipe.train.launch import StageFailed, Stopped, run_cases
from evenpipe.train.machine import check_memory
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.result import Iteration, RunResult
from evenpipe.upstream.installed import has_module, too_old_torch

__all__ = ["add_fields", "options_from", "run_training"]


def add_fields(group: _ArgumentGroup, names: Iterable[str]) -> None:
    """A flag for each of these fields of TrainOptions; values stay text, for :func:`options_from`."""
    for name in names:
        field = TrainOptions.model_fields[name]
        if field.annotation is bool:
            group.add_argument(command_flag(name), action="store_true", default=SUPPRESS, help=field.description)
        else:
            default = "" if field.default is None else f" (default {field.default})"
            text = f"{field.description}{default}"
            texts: dict[str, Any] = {"default": SUPPRESS, "metavar": name.upper()[:1], "help": text}
            if name == "schedule":
                add_schedule(group, **texts)
            else:
                group.add_argument(command_flag(name), **texts)


def options_from(arguments: Namespace, kind: type[TrainOptions], names: Collection[str]) -> TrainOptions:
    """Return the options of these names, checked as that kind does; UsageError, in one line, for what cannot be."""
    try:
        return kind.of(**{name: value for name, value in vars(arguments).items() if name in names})
    except OptionsError as error:
        raise UsageError(str(error)) from error


def run_training(command: str, cases: Sequence[TrainOptions], names: Sequence[str]) -> list[RunResult]:
    """Return the results of `cases`, shown under `names` while they run, for sub-command `command`.

    Signal n ends the process with status 128 + n. Raises RunFailed; UsageError without what the engine needs, and for
    options that turned out wrong.
    """
    for required in {ENGINES[options.engine].requires for options in cases}:
        if required is not None and not has_module(required[0]):
            raise UsageError(required[1])
    if (said := too_old_torch()) is not None:
        raise UsageError(said)
    try:
        for options in cases:
            check_memory(options)
        with progress(command, "starts", lines=True) as show:
            each = cases[0].iterations

            def told(done: Iteration) -> None:
                number, found = done.iteration + 1, f"loss {done.loss:.4f}, {done.ms:,.0f} ms"
                what = f"{names[done.case]}: iteration {number}/{each}, {found}"
                show(what, done.case * each + number, len(cases) * each)

            return run_cases(cases, told)
    except OptionsError as error:
        raise UsageError(str(error)) from None
    except StageFailed as failure:
        raise RunFailed(str(failure), failure.details) from None
    except Stopped as stopped:
        print(f"evenpipe {command}: {stopped}", file=sys.stderr)
        raise SystemExit(128 + stopped.number) from None
