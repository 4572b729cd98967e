"""``evenpipe patches``: what EvenPipe replaces in other packages, and whether these are ones that it knows."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from evenpipe.cli.commands import add_command
from evenpipe.cli.parser import Commands, UsageError
from evenpipe.cli.patches_shown import markdown, show
from evenpipe.upstream.findings import Findings, Purpose
from evenpipe.upstream.installed import wrong_apex

__all__ = ["add_to"]


class _Found(NamedTuple):
    """Of each framework; None where there is none."""

    megatron: Findings | None
    deepspeed: Findings | None


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    parser = add_command(commands, "patches")
    parser.add_argument(
        "--check",
        type=Path,
        metavar="PATH",
        help="look at this checkout of Megatron-LM or DeepSpeed instead, or at the folder that megatron-core or "
        "deepspeed is installed in, without importing anything; exit status 0 if what is there is supported, 1 if not",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON document")
    form.add_argument("--markdown", action="store_true", help="print the list alone, which no installation changes")
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> int:
    if arguments.markdown:
        if arguments.check is not None:
            raise UsageError("--markdown lists what is the same for every release: leave out --check")
        print("\n".join(markdown()))
        return 0
    found = _found(arguments.check)
    if arguments.json:
        print(json.dumps(_document(found)))
    else:
        show(found.megatron, found.deepspeed, Console(), installed=arguments.check is None)
    return int(arguments.check is not None and not all(part.supported for part in found if part is not None))


def _found(path: Path | None) -> _Found:
    """In the folder `path`, or what this interpreter imports."""
    from evenpipe.deepspeed import catalogue as deepspeed
    from evenpipe.megatron import catalogue as megatron

    if path is None:
        return _Found(megatron.look(), deepspeed.look())
    if not path.is_dir():
        raise UsageError(f"--check {path}: there is no such folder: name a checkout of Megatron-LM or DeepSpeed")
    found = _Found(
        megatron.examine(path) if (path / megatron.VERSION_FILE).is_file() else None,
        deepspeed.examine(path) if (path / deepspeed.MAIN_FILE).is_file() else None,
    )
    if found == (None, None):
        raise UsageError(
            f"--check {path}: has neither {megatron.VERSION_FILE} nor {deepspeed.MAIN_FILE}: name a checkout of "
            "Megatron-LM or DeepSpeed, or the folder (site-packages) that megatron-core or deepspeed is installed in"
        )
    return found


def _document(found: _Found) -> dict[str, Any]:
    """Megatron's part, if there is one, has its keys at the top; DeepSpeed's is under its name, null without one."""
    document: dict[str, Any] = {"format": "evenpipe.patches/1"}
    if found.megatron is not None:
        document |= _part(found.megatron)
        document |= {"cpu_mode_problems": list(found.megatron.problems(Purpose.CPU_MODE)), "wrong_apex": wrong_apex()}
    return document | {"deepspeed": None if found.deepspeed is None else _part(found.deepspeed)}


def _part(findings: Findings) -> dict[str, Any]:
    return {
        "path": None if findings.root is None else str(findings.root),
        "version": findings.version,
        "series": findings.series,
        "supported": findings.supported,
        "problems": list(findings.problems()),
        "symbols": [
            {
                "needed_for": item.purpose.value,
                "set": item.owner,
                "patch": item.name if item.is_replaced else None,
                "symbols": list(item.symbols),
                "series": list(item.versions),
                "state": state.value,
                "detail": detail,
                "reason": item.reason,
            }
            for item, state, detail in findings.findings
        ],
    }
