"""``evenpipe doctor``: look at the machine, or with torchrun at all machines of a job, before the job starts."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from rich.console import Console
from rich.text import Text

from evenpipe.cli.parser import Commands, UsageError, add_command, sentence
from evenpipe.cli.progress import progress
from evenpipe.cli.shown import console_of, print_table
from evenpipe.cli.values import gibibytes, positive
from evenpipe.doctor.environment import environment
from evenpipe.doctor.finding import Check, Finding, Reported, Verdict, by_finding, run_checks
from evenpipe.doctor.installed import framework, gpus, python_and_torch, topology
from evenpipe.doctor.job import Launched
from evenpipe.doctor.links import Together, Wanted, gather_findings
from evenpipe.doctor.machine import open_files, shared_memory, storage
from evenpipe.report.bandwidth import ModelShape, Recompute

__all__ = ["add_to"]

_STYLES: Final = dict(zip(Verdict, ("green", "yellow", "bold red", "dim"), strict=True))
# Importing a framework on a cold network file system takes this long.
_IMPORT_SECONDS: Final = 120.0
# Ranks that look at frameworks report later than others.
_LATE_SECONDS: Final = 150.0


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    parser = add_command(
        commands,
        "doctor",
        description=f"{sentence('doctor')} Exit status 1 if there is a problem; each has its remedy.",
        usage="[torchrun ... -m] evenpipe doctor [OPTIONS]",
        epilog="--json prints a document evenpipe.doctor/1: ok, ranks, missing (ranks), findings (check, verdict: "
        "fine, note, problem or not looked at, said, remedy, ranks) and pairs (stages, ranks, crosses_nodes, gbps, "
        "needs_gbps: equations 10 to 12, hides_all_gbps: 7 to 9, or null without --model).",
    )
    parser.add_argument("--checkpoint-dir", type=Path, metavar="DIR", help="where the run is to write its checkpoints")
    parser.add_argument("--checkpoint-gib", type=gibibytes, metavar="X", help="how large one of them is")
    group = parser.add_argument_group("of a job (torchrun ... -m evenpipe doctor)")
    group.add_argument("--stages", type=positive, metavar="P", help="pipeline stages (default: as many as fit)")
    group.add_argument("--tensor-parallel", type=positive, metavar="T", help="default 1")
    group.add_argument("--model", metavar="NAME", help="a name, or PATH.yaml[:NAME], to know what links need to carry")
    group.add_argument("--micro-batch-size", type=positive, default=1, metavar="B")
    group.add_argument("--recompute", choices=get_args(Recompute), default="none", help="what backwards recompute")
    group.add_argument(
        "--limit-s", type=positive, default=60, metavar="S", help="how long ranks wait for each other (default 60)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> int:
    if arguments.checkpoint_gib is not None and arguments.checkpoint_dir is None:
        raise UsageError("--checkpoint-gib: where are they to go? Give --checkpoint-dir DIR, or leave it out")
    wanted = Wanted(
        arguments.stages,
        arguments.tensor_parallel or 1,
        _shape(arguments.model),
        arguments.micro_batch_size,
        arguments.recompute,
    )
    try:
        launched = Launched.of(os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from None
    together, patience = Together(launched, wanted, float(arguments.limit_s)), arguments.limit_s + _LATE_SECONDS
    limit = _IMPORT_SECONDS + 5 * arguments.limit_s  # each of its checks has a limit of its own within this one
    of_the_job: list[Finding] = []
    waiting = False
    if launched.world > 1:
        of_the_job, waiting = run_checks([Check("ranks", together.meet, limit, "torch and the job's store")])
    alone = launched.world == 1  # several ranks write to one terminal
    with progress("doctor", "looks at this machine") if alone else contextlib.nullcontext():
        found, late = run_checks(_checks(arguments, launched))
    found, job = [*found, *of_the_job], together.job
    reported = by_finding({launched.rank: found}) if job is None else gather_findings(job, found, patience)
    status = 0
    if job is None or job.reports:
        status = int(any(finding.verdict is Verdict.PROBLEM for finding, _ in reported))
        if arguments.json:
            missing = [] if job is None else job.missing
            print(json.dumps(_document(reported, together.rows, launched.world, missing)))
        else:
            _show(reported, together.rows, launched.world, console_of())
        sys.stdout.flush()
    if job is not None:
        with contextlib.suppress(RuntimeError):
            job.end(2 * patience)
    if waiting or late or launched.world > 1:
        # Not by way of what still waits in a thread, nor of torch's own end, which waits for peers.
        sys.stderr.flush()
        os._exit(status)
    return status


def _shape(name: str | None) -> ModelShape | None:
    from evenpipe.descriptions import DescriptionError, model

    if name is None:
        return None
    try:
        of = model(name)
    except DescriptionError as error:
        raise UsageError(f"--model {error}") from None
    return ModelShape(of.layers, of.heads, of.hidden, of.sequence)


def _checks(arguments: Namespace, launched: Launched) -> list[Check]:
    several_nodes = launched.world > launched.per_node
    of_each_rank = [
        Check("environment", lambda: environment(os.environ, several_nodes, arguments.tensor_parallel)),
        Check("open files", lambda: open_files(launched.world)),
    ]
    if launched.local_rank != 0:
        return of_each_rank
    slow = "see whether the file system that Python is installed on answers"
    size = None if arguments.checkpoint_gib is None else arguments.checkpoint_gib * 2**30
    folder = arguments.checkpoint_dir
    return [
        Check("python", python_and_torch),
        Check("megatron-core", lambda: framework("megatron-core", _megatron), _IMPORT_SECONDS, "its import", slow),
        Check("deepspeed", lambda: framework("deepspeed", _deepspeed), _IMPORT_SECONDS, "its files", slow),
        Check("GPUs", gpus, _IMPORT_SECONDS, "torch.cuda", "a GPU or the driver is stuck (dmesg: Xid): drain the node"),
        Check("GPU links", topology),
        *of_each_rank,
        Check("shared memory", shared_memory),
        Check("checkpoints", lambda: storage(folder, several_nodes, size), waits_for=f"the file system of {folder}"),
    ]


def _megatron() -> Any:
    from evenpipe.megatron_lm.catalogue import look

    findings = look()
    missing = findings.root is None and findings.problem is not None and "ModuleNotFound" in findings.problem
    return None if missing else findings


def _deepspeed() -> Any:
    from evenpipe.deepspeed.catalogue import look

    return look()


def _document(
    reported: Sequence[Reported], pairs: Sequence[Mapping[str, Any]], ranks: int, missing: Sequence[int]
) -> dict[str, Any]:
    """evenpipe.doctor/1."""
    return {
        "format": "evenpipe.doctor/1",
        "ok": not any(finding.verdict is Verdict.PROBLEM for finding, _ in reported),
        "ranks": ranks,
        "missing": list(missing),
        "findings": [
            {
                "check": finding.check,
                "verdict": finding.verdict.value,
                "said": finding.said,
                "remedy": finding.remedy,
                "ranks": list(on),
            }
            for finding, on in reported
        ],
        "pairs": list(pairs),
    }


def _show(reported: Sequence[Reported], pairs: Sequence[Mapping[str, Any]], ranks: int, console: Console) -> None:
    """One table, the pairs below it, and how many problems there are."""
    last, rows = None, []
    for finding, on in reported:
        text = Text(finding.said)
        if finding.remedy is not None:
            text.append(f"\n→ {finding.remedy}", style=_STYLES[finding.verdict])
        head = Text("" if finding.check == last else finding.check)
        verdict = Text(finding.verdict.value, style=_STYLES[finding.verdict])
        rows.append((head, verdict, *((Text(_spans(on)),) if ranks > 1 else ()), text))
        last = finding.check
    print_table(console, ("check", "", *(("ranks",) if ranks > 1 else ()), "found"), rows)
    if pairs:
        console.print("\nlinks between partners")
        print_table(console, ("stages", "ranks", "link", "has GB/s", "needs GB/s"), _links(pairs))
    count = sum(finding.verdict is Verdict.PROBLEM for finding, _ in reported)
    result = "no problems" if count == 0 else f"{count} problem{'s' if count > 1 else ''}"
    console.print(Text(f"\n{result}", style=_STYLES[Verdict.PROBLEM if count else Verdict.FINE]))


def _links(pairs: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    for pair in pairs:
        need = pair["needs_gbps"]
        yield (
            "-".join(map(str, pair["stages"])),
            "-".join(map(str, pair["ranks"])),
            "between nodes" if pair["crosses_nodes"] else "same node",
            f"{pair['gbps']:.2f}",
            "" if need is None else f"{need:.2f}",
        )


def _spans(ranks: Sequence[int]) -> str:
    """0-3, 7."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)
