"""``evenpipe run``: a script of Megatron-LM or of DeepSpeed, unmodified, with EvenPipe in it."""

from __future__ import annotations

import argparse
import io
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

from evenpipe.cli.parser import Commands, UsageError, add_command
from evenpipe.upstream.ending import end_job

__all__ = ["add_to"]

_SPAWNED = "evenpipe.cli.spawned"


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    parser = add_command(
        commands,
        "run",
        usage="torchrun ... -m evenpipe run [--cpu | --deepspeed] SCRIPT [FLAGS ...]"
        "\n       evenpipe run --estimate [--cluster NAME] [--json] [-q | -v]"
        "\n                             SCRIPT [FLAGS ...]",
        description="Run a training script of Megatron-LM, unmodified. Its flags are Megatron's own, and those of the "
        "group EvenPipe that `evenpipe run SCRIPT --help` shows; without any of them the run is stock. With "
        '--deepspeed, a script that uses DeepSpeed: the section "evenpipe" of its configuration takes effect. With '
        "--estimate, which needs no torchrun, nothing is trained: what `evenpipe estimate` says of the run is printed.",
        beyond="the script's own go after it",
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--cpu", action="store_true", help="train on CPU and gloo, to try a configuration without GPUs")
    way.add_argument("--deepspeed", action="store_true", help="the script is one of DeepSpeed")
    way.add_argument("--estimate", action="store_true", help="tell what the run will need and how fast it will be")
    group = parser.add_argument_group("with --estimate")
    group.add_argument(
        "--cluster",
        metavar="NAME",
        help="NODESxGPUS-NAME, or PATH.yaml[:NAME][@NODESxGPUS]; without sizes, those of WORLD_SIZE and "
        "LOCAL_WORLD_SIZE, or as few GPUs as the flags need (default a100-80gb)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON document evenpipe.estimate/1")
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="such as pretrain_gpt.py")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAGS", help="the script's own")
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> None:
    script: Path = arguments.script
    try:
        with io.open_code(str(script)) as file:
            code = compile(file.read(), str(script), "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"{script}: {error.strerror}: name the script to run, such as pretrain_gpt.py") from None
    except (SyntaxError, ValueError) as error:
        at = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        said = error.msg if isinstance(error, SyntaxError) else error
        raise UsageError(f"{script}{at}: is no Python ({said}): correct it, or name another script") from None
    if arguments.estimate:
        from evenpipe.cli.run_estimate import estimated

        estimated(arguments, lambda listener: _run_script(arguments, code, listener))
        return
    for option in ("cluster", "json", "quiet", "verbose"):
        if getattr(arguments, option):
            raise UsageError(f"--{option}: is for --estimate: add that, or leave this out")
    if arguments.cpu:
        os.environ["EVENPIPE_CPU"] = "1"
    try:
        _run_script(arguments, code)
    except Exception as error:
        if not (arguments.cpu or arguments.deepspeed) and _misses_a_gpu(error):
            end_job(f"{error}: this machine has no GPU: put --cpu before {script}, to try it on CPU")
        # Here, since an error of the script is none of the command's.
        try:
            sys.excepthook(*sys.exc_info())
        finally:
            raise SystemExit(1) from None


def _misses_a_gpu(error: Exception) -> bool:
    """Return whether `error` is what Megatron raises without a GPU.

    Megatron imports triton, which CPU builds of torch lack, or asks for CUDA.
    """
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_available():
        return False
    return str(error) == "Megatron requires CUDA." or getattr(error, "name", None) == "triton"


def _run_script(arguments: Namespace, code: CodeType, listener: Callable[..., None] | None = None) -> None:
    """As `python SCRIPT FLAGS` would; a ``listener`` hears of Megatron's arguments, and nothing is started."""
    script: Path = arguments.script
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

        evenpipe.megatron.install(listener)
        # But spawned children, such as those that write checkpoints, start with the module _SPAWNED.
        os.environ["EVENPIPE_SCRIPT"] = str(script.resolve())
        main.__spec__ = ModuleSpec(_SPAWNED, loader=None)
    sys.modules["__main__"] = main
    exec(code, vars(main))
