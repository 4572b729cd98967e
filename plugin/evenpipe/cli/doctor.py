"""``evenpipe doctor``: look at the machine, or with torchrun at all machines of a job, before the job starts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenpipe.cli.parser import Commands, UsageError, add_command, sentence
from evenpipe.cli.values import gibibytes, positive
from evenpipe.doctor.environment import environment
from evenpipe.doctor.finding import Check, Finding, Verdict, problem, run_checks, unseen
from evenpipe.doctor.installed import apex, framework, gpus, python_and_torch, topology
from evenpipe.doctor.job import Job, Launched, NoMeetingError, meet
from evenpipe.doctor.links import Measured, Pipelines, Wanted, clocks, measure, named, pairs, start_group, verdicts
from evenpipe.doctor.machine import clock, open_files, ports, shared_memory, storage
from evenpipe.runtime.bandwidth import ModelShape, Recompute

__all__ = ["Said", "add_to", "document", "gathered", "show"]

_STYLES: Final = {
    Verdict.FINE: "green",
    Verdict.NOTE: "yellow",
    Verdict.PROBLEM: "bold red",
    Verdict.UNSEEN: "dim",
}
_WIDTH_OF_A_LOG: Final = 160


class Said(NamedTuple):
    """A finding, and the ranks that have it."""

    finding: Finding
    ranks: tuple[int, ...]


def gathered(by_rank: Mapping[int, Sequence[Finding]]) -> list[Said]:
    """What several ranks found alike is one entry; checks stay together, in the order in which they first appear."""
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in sorted(by_rank.items()):
        for finding in findings:
            if rank not in ranks.setdefault(finding, []):
                ranks[finding].append(rank)
    checks = list(dict.fromkeys(finding.check for finding in ranks))
    return sorted(
        (Said(finding, tuple(those)) for finding, those in ranks.items()),
        key=lambda said: checks.index(said.finding.check),
    )


def document(
    said: Sequence[Said], pairs: Sequence[Mapping[str, Any]], ranks: int, missing: Sequence[int]
) -> dict[str, Any]:
    """evenpipe.doctor/1."""
    return {
        "format": "evenpipe.doctor/1",
        "ok": not any(each.finding.verdict is Verdict.PROBLEM for each in said),
        "ranks": ranks,
        "missing": list(missing),
        "findings": [
            {
                "check": finding.check,
                "verdict": finding.verdict.value,
                "said": finding.said,
                "remedy": finding.remedy,
                "ranks": list(those),
            }
            for finding, those in said
        ],
        "pairs": list(pairs),
    }


def show(said: Sequence[Said], pairs: Sequence[Mapping[str, Any]], ranks: int, console: Console) -> None:
    """One table, the pairs below it, and how many problems there are."""
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_LOG
    table = Table("check", "", *(("ranks",) if ranks > 1 else ()), "found", box=None, pad_edge=False)
    last = None
    for finding, those in said:
        text = Text(finding.said)
        if finding.remedy is not None:
            text.append(f"\n→ {finding.remedy}", style=_STYLES[finding.verdict])
        head = Text("" if finding.check == last else finding.check)
        verdict = Text(finding.verdict.value, style=_STYLES[finding.verdict])
        table.add_row(head, verdict, *((Text(_spans(those)),) if ranks > 1 else ()), text)
        last = finding.check
    console.print(table)
    if pairs:
        console.print(_links(pairs))
    count = sum(each.finding.verdict is Verdict.PROBLEM for each in said)
    result = "no problems" if count == 0 else f"{count} problem{'s' if count > 1 else ''}"
    console.print(Text(f"\n{result}", style=_STYLES[Verdict.PROBLEM if count else Verdict.FINE]))


def _links(pairs: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("stages", "ranks", "link", "has GB/s", "needs GB/s", box=None, pad_edge=False, title_justify="left")
    table.title = "links between partners"
    for pair in pairs:
        need = pair["needs_gbps"]
        table.add_row(
            "-".join(map(str, pair["stages"])),
            "-".join(map(str, pair["ranks"])),
            "between nodes" if pair["crosses_nodes"] else "same node",
            f"{pair['gbps']:.2f}",
            "" if need is None else f"{need:.2f}",
        )
    return table


def _spans(ranks: Sequence[int]) -> str:
    """0-3, 7."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)


# Importing a framework on a cold network file system takes this long.
_IMPORT_SECONDS: Final = 120.0
# Ranks that look at frameworks tell what they found later than others.
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
    together = _Together(arguments, launched, wanted)
    of_the_job, waiting = run_checks(together.checks()) if launched.world > 1 else ([], False)
    found, late = run_checks(_checks(arguments, launched))
    job, missing = together.job, [] if together.job is None else together.job.missing
    said = gathered({launched.rank: [*found, *of_the_job]})
    if job is not None:
        said = _told(job, [*found, *of_the_job], arguments.limit_s + _LATE_SECONDS)
    speaks = job is None or job.reports
    status = 0
    if speaks:
        status = int(any(each.finding.verdict is Verdict.PROBLEM for each in said))
        ranks = launched.world
        if arguments.json:
            print(json.dumps(document(said, together.rows, ranks, missing)))
        else:
            show(said, together.rows, ranks, Console())
        sys.stdout.flush()
    if job is not None:
        with contextlib.suppress(RuntimeError):
            job.end(2 * (arguments.limit_s + _LATE_SECONDS))
    if waiting or late or launched.world > 1:
        # Not by way of what still waits in a thread, nor of torch's own end, which waits for peers.
        sys.stderr.flush()
        os._exit(status)
    return status


def _shape(name: str | None) -> ModelShape | None:
    from evenpipe.planner.descriptions import DescriptionError, model

    try:
        found = None if name is None else model(name)
    except DescriptionError as error:
        raise UsageError(f"--model {error}") from None
    return None if found is None else ModelShape(found.layers, found.heads, found.hidden, found.sequence)


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
        Check("apex", apex),
        Check("GPUs", gpus, _IMPORT_SECONDS, "torch.cuda", "a GPU or the driver is stuck (dmesg: Xid): drain the node"),
        Check("GPU links", topology),
        *of_each_rank,
        Check("shared memory", shared_memory),
        Check("ports", lambda: ports(os.environ, launched.world > 1 or "TORCHELASTIC_RUN_ID" in os.environ)),
        Check("clock", clock),
        Check("checkpoints", lambda: storage(folder, several_nodes, size), waits_for=f"the file system of {folder}"),
    ]


def _megatron() -> Any:
    from evenpipe.megatron.catalogue import look

    found = look()
    return None if found.root is None and found.problem is not None and "ModuleNotFound" in found.problem else found


def _deepspeed() -> Any:
    from evenpipe.deepspeed.catalogue import look

    return look()


class _Together:
    """What the ranks of a job look at together: ``job``, once they have met, and ``rows``, one a pair."""

    def __init__(self, arguments: Namespace, launched: Launched, wanted: Wanted) -> None:
        self._limit = float(arguments.limit_s)
        self._launched = launched
        self._wanted = wanted
        self.job: Job | None = None
        self.rows: list[dict[str, Any]] = []

    def checks(self) -> list[Check]:
        """Each waits for other ranks, and has its own limit within the last one's."""
        return [Check("ranks", self._meet, _IMPORT_SECONDS + 5 * self._limit, "torch and the job's store")]

    def _meet(self) -> Iterator[Finding]:
        launched, limit = self._launched, self._limit
        try:
            job = Job(meet(os.environ, launched, limit), launched, limit)
        except NoMeetingError as error:
            yield problem("ranks", str(error), error.remedy)
            return
        except ImportError as error:
            yield unseen("ranks", f"torch.distributed cannot be imported: {error}")
            return
        self.job = job
        if job.missing:
            said = f"{named(job.missing)} of {launched.world} {'has' if len(job.missing) == 1 else 'have'} not come"
            yield problem("ranks", said, "see whether that process was started, and reaches MASTER_ADDR:MASTER_PORT")
        elif not job.agree():
            yield problem("ranks", "not all ranks see all others", "start the doctor again")
        else:
            yield from self._measure(job)

    def _measure(self, job: Job) -> Iterator[Finding]:
        try:
            pipelines = Pipelines.of(self._wanted, job.present)
        except ValueError as error:
            yield problem("BPipe pairs", str(error), "correct --stages or --tensor-parallel")
            return
        if job.reports:
            yield from pairs(pipelines, job.present)
        check = Check(
            "links",
            lambda: self._links(job, pipelines),
            2 * self._limit,
            "ranks that this one is connected with",
            "see that no firewall is between nodes, and that NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the "
            "network they share",
        )
        found, _ = run_checks([check])
        yield from found

    def _links(self, job: Job, pipelines: Pipelines) -> Iterator[Finding]:
        launched = self._launched
        start_group(meet(os.environ, launched, self._limit, "group"), launched, self._limit)
        yield from clocks(launched.rank, launched.world)
        mine = measure(launched.rank, pipelines, self._wanted)
        measured = job.gather("measured", dataclasses.astuple(mine), self._limit)
        if job.reports and len(measured) == launched.world:
            all_of = {rank: Measured(*each) for rank, each in measured.items()}
            found, self.rows = verdicts(pipelines, job.present, self._wanted, all_of)
            yield from found


def _told(job: Job, found: list[Finding], seconds: float) -> list[Said]:
    """On the rank that reports: what all ranks have found, and which have not said anything."""
    told = job.gather("report", [(check, verdict.value, *rest) for check, verdict, *rest in found], seconds)
    by_rank = {
        rank: [Finding(check, Verdict(verdict), *rest) for check, verdict, *rest in each] for rank, each in told.items()
    }
    silent = [rank for rank in job.present if rank not in told]
    said = gathered(by_rank)
    if silent and job.reports:
        line = f"{named(silent)} came, and then said nothing for {seconds:g} s"
        said.append(Said(problem("ranks", line, "see what that process is doing (py-spy dump --pid)"), tuple(silent)))
    return said
