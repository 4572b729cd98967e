"""Failures of `evenpipe train`, rehearsed in its second iteration: a stage raises, gives NaN, or is killed.

As a script, with the arguments STAGE:ACTION KIND and those of `evenpipe`: that command, with the failure.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple
from unittest import mock

from evenpipe.schedule import Action, parse

__all__ = ["Fault"]


class Fault(NamedTuple):
    """A failure at `at`, STAGE:ACTION such as 1:B3 or 0:E1; NaN is for the output of a forward.

    In a stream of batches, the action's micro-batch tells the iteration.
    """

    at: str
    kind: Literal["raise", "nan", "kill"] = "raise"

    def rehearsed(self) -> AbstractContextManager[object]:
        """Inside, the processes of every training run have this failure."""
        from evenpipe.train import process

        return mock.patch.object(process, "train_cases", self)

    def __call__(self, cases: tuple[Any, ...], *rest: Any) -> Any:
        """Train in one process, with the failure; takes the arguments of `evenpipe.train.process.train_cases`."""
        import torch
        from torch.nn.modules.module import register_module_forward_hook

        from evenpipe.train.engine import FailureContext
        from evenpipe.train.process import train_cases

        stage, _, text = self.at.partition(":")
        action, start_iteration, start_action = parse(text), FailureContext.start_iteration, FailureContext.start_action
        if cases[0].streams:
            action = action._replace(micro_batch=action.micro_batch + cases[0].micro_batches)
        present = {"iteration": -1, "spoils": False}

        def iteration_starts(context: FailureContext, iteration: int) -> None:
            present["iteration"] = iteration
            start_iteration(context, iteration)

        def action_starts(context: FailureContext, started: Action) -> None:
            start_action(context, started)
            due = context.stage == int(stage) and started == action
            due = due and (present["iteration"] == 1 or cases[0].streams)
            present["spoils"] = due and self.kind == "nan"
            if due and self.kind == "raise":
                raise RuntimeError("rehearsed failure")
            if due and self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)

        def spoiled(module: torch.nn.Module, inputs: object, output: Any) -> Any:
            if not present["spoils"]:
                return None
            if isinstance(output, tuple):
                return tuple(spoiled(module, inputs, one) if torch.is_tensor(one) else one for one in output)
            return output * float("nan") if torch.is_tensor(output) and output.is_floating_point() else output

        FailureContext.start_iteration, FailureContext.start_action = iteration_starts, action_starts
        register_module_forward_hook(spoiled)
        return train_cases(cases, *rest)


def _main(at: str, kind: Any, *command: str) -> int:
    from evenpipe.cli.main import main
    from tests.rig import faults  # by the name that training processes import it by

    with faults.Fault(at, kind).rehearsed():
        return main(list(command))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
