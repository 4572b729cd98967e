"""Run training cases for a command: progress on standard error, and a failure's one line as the last."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from evenpipe.cli.parser import UsageError
from evenpipe.cli.progress import training_progress
from evenpipe.train.engines import ENGINES
from evenpipe.train.launch import StageFailed, Stopped, run_cases
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.result import RunResult

__all__ = ["run_training"]


def run_training(command: str, cases: Sequence[TrainOptions], names: Sequence[str]) -> list[RunResult]:
    """The results of `cases`, shown under `names` while they run, for the sub-command `command`.

    A failure ends the process: status 1 and the failure as the last line; 128 + n for signal n. UsageError without
    what the engine needs, and for options that turned out wrong.
    """
    for required in {ENGINES[options.engine].requires for options in cases}:
        if required is not None and find_spec(required[0]) is None:
            raise UsageError(required[1])
    try:
        with training_progress(list(names), cases[0].iterations) as show:
            return run_cases(cases, show)
    except OptionsError as error:
        raise UsageError(str(error)) from None
    except StageFailed as failure:
        print(failure.details, end="", file=sys.stderr)
        print(f"evenpipe {command}: {failure}", file=sys.stderr)
        raise SystemExit(1) from None
    except Stopped as stopped:
        print(f"evenpipe {command}: {stopped}", file=sys.stderr)
        raise SystemExit(128 + stopped.number) from None
