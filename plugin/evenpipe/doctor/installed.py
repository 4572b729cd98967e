"""Check installed packages against what EvenPipe knows, the GPUs of this machine, and the links between them."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import combinations
from typing import Final

from evenpipe.doctor.finding import Finding, fine, noted, problem, unseen
from evenpipe.upstream.findings import Findings, Purpose, State
from evenpipe.upstream.installed import too_old_torch

__all__ = ["framework", "gpus", "python_and_torch", "topology"]

_PYTHON: Final = (3, 10)


def python_and_torch() -> Iterator[Finding]:
    """This interpreter, and the torch that it would import."""
    here = f"Python {platform.python_version()} in {sys.prefix}"
    if sys.version_info < _PYTHON:
        yield problem("python", here, f"use {_PYTHON[0]}.{_PYTHON[1]} or newer")
    else:
        yield fine("python", here)
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield problem("torch", "not installed", "pip install torch")
        return
    if (too_old := too_old_torch()) is not None:
        said, _, remedy = too_old.removeprefix("torch ").rpartition(": ")
        yield problem("torch", said, remedy)
    else:
        yield fine("torch", version)


def framework(name: str, look: Callable[[], Findings | None]) -> Iterator[Finding]:
    """A framework that EvenPipe plugs into: its version, and the patches that would apply (``evenpipe patches``)."""
    found = look()
    if found is None:
        yield noted(name, "not installed here")
        return
    version = f"{found.version or 'unknown version'} in {found.root}"
    if problems := found.problems():
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        yield problem(
            name, f"{version}: not supported: {problems[0]}{more}", "install a supported release; evenpipe patches"
        )
        return
    replaced = [each for each in found.findings if each.item.is_replaced and each.item.purpose is Purpose.TRAINING]
    fit = sum(each.state in (State.FITS, State.APPLIED) for each in replaced)
    absent = sum(each.state is State.ABSENT for each in replaced)
    without = f", {absent} are for scripts that are not installed" if absent else ""
    yield fine(name, f"{version}: supported; {fit} of {len(replaced)} replaced symbols fit{without} (evenpipe patches)")


#: How `nvidia-smi topo -m` calls what lies between two GPUs, the slowest first.
_SLOW: Final = {
    "SYS": "the link between the sockets of CPUs",
    "NODE": "the links between PCIe host bridges",
    "PHB": "a PCIe host bridge, through the CPU",
}
_SECONDS: Final = 8.0


def gpus() -> Iterator[Finding]:
    """Yield which GPUs torch sees, and which of them do not reach each other's memory."""
    try:
        import torch
    except ImportError as error:
        yield unseen("GPUs", f"torch cannot be imported: {error}")
        return
    if not torch.cuda.is_available():
        build = "this torch is built for CPUs" if torch.version.cuda is None else "torch finds no usable driver or GPU"
        if torch.version.cuda is None and shutil.which("nvidia-smi"):
            yield problem("GPUs", f"{build}, and this machine has nvidia-smi", "install a torch that is built for CUDA")
        else:
            yield unseen("GPUs", f"{build}: neither GPUs nor their memory and peer access were looked at")
        return
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    kinds = {(one.name, one.total_memory) for one in found}
    listed = ", ".join(f"{name} ({memory / 2**30:.0f} GiB)" for name, memory in sorted(kinds))
    if len(kinds) > 1:
        yield problem("GPUs", f"{len(found)} of different kinds: {listed}", "use equal ones: the slowest sets the pace")
    else:
        yield fine("GPUs", f"{len(found)} x {listed}")
    apart = [
        f"{one}-{other}"
        for one, other in combinations(range(len(found)), 2)
        if not (torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one))
    ]
    if apart:
        said = f"GPUs {', '.join(apart[:8])} do not reach each other's memory: they talk through the host's"
        yield noted("peer access", said, "let BPipe's partners be others; see IOMMU and ACS settings")
    elif len(found) > 1:
        yield fine("peer access", "all GPUs reach each other's memory")


def topology() -> Iterator[Finding]:
    """Yield what `nvidia-smi topo -m` says of the paths between GPUs."""
    command = shutil.which("nvidia-smi")
    if command is None:
        yield unseen("GPU links", "nvidia-smi is not here")
        return
    try:
        done = subprocess.run([command, "topo", "-m"], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        yield problem(
            "GPU links",
            f"nvidia-smi gave no answer within {_SECONDS:g} s",
            "a GPU or the driver is stuck (dmesg: Xid): drain the node",
        )
        return
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        yield problem("GPU links", f"nvidia-smi topo -m fails: {said}", "repair the driver")
        return
    yield from _paths(done.stdout)


def _paths(table: str) -> Iterator[Finding]:
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in table.splitlines()]
    rows = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    paths = {(a, b): rows[a][1 + b] for a, b in combinations(range(len(rows)), 2)}
    if not paths:
        yield fine("GPU links", "one GPU")
        return
    slow = {pair: path for pair, path in paths.items() if path in _SLOW}
    kinds = ", ".join(f"{list(paths.values()).count(kind)} {kind}" for kind in sorted(set(paths.values())))
    if not slow:
        yield fine("GPU links", f"pairs of GPUs by path: {kinds}")
        return
    (a, b), path = next(iter(slow.items()))
    yield noted(
        "GPU links",
        f"pairs of GPUs by path: {kinds}; GPU{a} and GPU{b}, among {len(slow)}, are joined by {_SLOW[path]}",
        "let stages that trade activations be joined by NVLink or a PCIe switch (--pair-adjacent)",
    )
