"""``evenpipe run``: a script of Megatron-LM or of DeepSpeed, unmodified, with EvenPipe in it."""

from __future__ import annotations

import argparse
import io
import os
import sys
from argparse import Namespace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from evenpipe.cli.parser import Commands, UsageError

__all__ = ["add_to"]

_SPAWNED = "evenpipe.cli.spawned"


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "run",
        help="run a training script of Megatron-LM or DeepSpeed, unmodified, with EvenPipe in it",
        usage="torchrun ... -m evenpipe run [-h] [--cpu | --deepspeed] SCRIPT [FLAGS...]",
        description="Run a training script of Megatron-LM, unmodified. Its flags are Megatron's own, and those of the "
        "group EvenPipe that `evenpipe run SCRIPT --help` shows; without any of them the run is stock. With "
        '--deepspeed, a script that uses DeepSpeed: the section "evenpipe" of its configuration takes effect.',
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--cpu", action="store_true", help="train on CPU and gloo, to try a configuration without GPUs")
    way.add_argument("--deepspeed", action="store_true", help="the script is one of DeepSpeed")
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="such as pretrain_gpt.py")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAGS", help="the script's own")
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> None:
    script: Path = arguments.script
    try:
        with io.open_code(str(script)) as file:
            source = file.read()
    except OSError as error:
        raise UsageError(f"{script}: {error.strerror}: name the script to run, such as pretrain_gpt.py") from None
    if arguments.cpu:
        os.environ["EVENPIPE_CPU"] = "1"
    sys.argv = [str(script), *arguments.flags]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(script.resolve().parent)
    # As `python SCRIPT FLAGS` would have it.
    main = ModuleType("__main__")
    main.__file__ = str(script)
    if arguments.deepspeed:
        import evenpipe.deepspeed

        evenpipe.deepspeed.install()
    else:
        import evenpipe.megatron

        evenpipe.megatron.install()
        # But spawned children, such as those that write checkpoints, start with the module _SPAWNED.
        os.environ["EVENPIPE_SCRIPT"] = str(script.resolve())
        main.__spec__ = ModuleSpec(_SPAWNED, loader=None)
    sys.modules["__main__"] = main
    try:
        exec(compile(source, str(script), "exec", dont_inherit=True), vars(main))
    except Exception:
        # Here, since an error of the script is none of the command's.
        try:
            sys.excepthook(*sys.exc_info())
        finally:
            raise SystemExit(1) from None
