"""The NCCL path on one GPU: pipelines whose links lead from a rank to itself.

Gradients have to be the bits of a loop without a pipeline, though every message takes a random while more, and memory
is filled with NaN as soon as it has been let go of. One run does not wait for its evictions: that must show, or the
others prove nothing.

The argument says what stages do: "schedules", "recomputation" (of layers, by both of torch's ways), "swaps" (to the
host's memory, and operations that run again in the backward), "sanitizer" (under `torch.cuda._sanitizer`),
"transformer-engine" (layers of it, in bf16 and FP8).
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evenpipe.runtime.communicators import communicator_bytes, ctas
from evenpipe.schedule import EVICT, GAINING, Program, Size, build, find, names
from evenpipe.train.options import TrainOptions
from evenpipe.train.transformer import initialised_piece

from .loop import Loops, Turns
from .looped import Case, Result, gradients_of, keeper_cases, seen_by_sanitizer, unwaited, without_pipeline
from .rank import Rank

__all__ = ["run"]

_Scope = Callable[[], AbstractContextManager[Any]]

STAGES, MICRO_BATCHES = 4, 6
#: Hidden size and tokens: on a GPU some of what a layer saves is packed into a message, and some is not.
_SIZES: Final = ((256, 512), (32, 32))


def run(rank: Rank, what: str) -> None:
    torch.use_deterministic_algorithms(rank.place != "cpu")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    checks = {
        "schedules": _schedules,
        "recomputation": _recomputation,
        "swaps": _swaps,
        "sanitizer": _sanitizer,
        "transformer-engine": _transformer_engine,
    }
    sanitized = what == "sanitizer" and rank.place != "cpu"
    with rank.world(1):
        loops = Loops(rank.device, seen_by_sanitizer if sanitized else None)
        checks[what](rank, _Compared(rank, loops, sanitized))
        loops.close()
    if rank.place == "cpu":
        rank.unchecked("NCCL's streams, and the caching allocator", "there is no GPU: a thread copies, the host waits")


def _schedules(rank: Rank, compared: _Compared) -> None:
    cases = {
        name + " with BPipe" * bpipe: (name, bpipe)
        for name in names()
        for bpipe in (False, True)
        if "stream" not in find(name).needs
    }
    rank.expect(cases)
    for what, (name, bpipe) in cases.items():
        program = _program(rank, what, name, bpipe)
        if program is not None:
            compared(what, Case(program, _layers(rank), _boundary(rank)))
    rank.unchecked("2bw", "its stages exchange norms by a collective of all ranks")
    with unwaited():
        compared.control("1f1b with BPipe, evictions not waited for", _with_bpipe(rank))
    _communicators(rank, compared.loops)


def _communicators(rank: Rank, loops: Loops) -> None:
    """Record what a communicator takes, and when the allocator reuses memory that was sent."""
    what = "memory, thread blocks and priority of a communicator; when memory that was sent is handed out again"
    if rank.place == "cpu":
        rank.unchecked(what, "there is no GPU")
        return
    turns, program = Turns(), build("1f1b", Size(2, 2))
    (link, _), (sender, taker) = program.links[:2], loops.connected(program, turns)
    nbytes = 64 << 20
    sent, taken = (torch.full((nbytes,), byte, dtype=torch.uint8, device=rank.device) for byte in (1, 0))
    address = sent.data_ptr()

    def message(tensor: Tensor) -> None:
        transfers = sender.channels[link].send([tensor]), taker.channels[link].receive([taken])
        for transfer in transfers:
            transfer.wait()

    with turns.turn, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        message(sent)
        torch.cuda.synchronize()
    del sent
    again = torch.empty(nbytes, dtype=torch.uint8, device=rank.device).data_ptr() == address
    rank.row("memory that was sent is handed out again", "at once" if again else "LATER")
    group = loops.group("an unused", 0, 1)
    before = torch.cuda.mem_get_info()[0]
    group._start_coalescing()
    group.send([taken[:1]], 0, 0)
    group.recv([taken[1:2]], 0, 0)
    group._end_coalescing().wait()
    torch.cuda.synchronize()
    after = torch.cuda.mem_get_info()[0]
    expected = communicator_bytes(os.environ) / 2**20
    rank.row("memory of a communicator of one rank", (before - after) / 2**20, "MiB", expected)
    rank.row("priority of a link's stream", "high" if group.options.is_high_priority_stream else "normal")
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    blocks = [one["args"]["grid"][0] for one in events if one.get("cat") == "kernel" and "nccl" in one["name"].lower()]
    if blocks:
        rank.row("thread blocks of a message", max(blocks), "blocks", ctas(os.environ))
    else:
        rank.unchecked("thread blocks of a message", "the profiler shows no kernel of NCCL's")


def _recomputation(rank: Rank, compared: _Compared) -> None:
    for reentrant in (False, True):
        for bpipe in (False, True):
            what = "1f1b" + " with BPipe" * bpipe + f", checkpointed layers, use_reentrant={reentrant}"
            program = build("1f1b", Size(STAGES, MICRO_BATCHES), bpipe)
            compared(what, Case(program, _layers(rank, reentrant), _boundary(rank)))


def _swaps(rank: Rank, compared: _Compared) -> None:
    cases = keeper_cases()
    boundary = torch.empty(cases.ROWS, cases.WIDTH, device=rank.device)
    for name in ("1f1b", "gpipe"):
        for bpipe in (False, True):
            if name == "gpipe" and bpipe:
                continue
            program = build(name, Size(STAGES, MICRO_BATCHES), bpipe, swaps=range(STAGES))
            for way in ("kept", "early"):
                what = f"{name}{' with BPipe' * bpipe}, swapped{' and computed again' if way == 'kept' else ''}"
                made = lambda position: cases.Block(position).to(rank.device)  # noqa: E731
                compared(what, Case(program, made, boundary, cases.WAYS[way]))
    for name, bpipe in (("1f1b", False), ("1f1b", True), ("gpipe", False), ("zb-h1", False)):
        program = build(name, Size(STAGES, MICRO_BATCHES), bpipe, swaps=GAINING)
        compared(
            f"{name}{' with BPipe' * bpipe}, a share swapped", Case(program, _layers(rank), _boundary(rank), swap=0.9)
        )


def _sanitizer(rank: Rank, compared: _Compared) -> None:
    if rank.place == "cpu":
        compared("1f1b with BPipe", _with_bpipe(rank))
        rank.unchecked("torch.cuda._sanitizer", "there is no GPU")
        return
    from torch.cuda._sanitizer import CUDASanitizerErrors

    case = _with_bpipe(rank)
    compared("1f1b with BPipe: no access without an order", case)
    cases = keeper_cases()
    swapping = build("1f1b", Size(STAGES, MICRO_BATCHES), True, swaps=range(STAGES))
    boundary = torch.empty(cases.ROWS, cases.WIDTH, device=rank.device)
    made = lambda position: cases.Block(position).to(rank.device)  # noqa: E731
    case_of_swaps = Case(swapping, made, boundary, cases.WAYS["kept"])
    compared("1f1b with BPipe and swaps: no access without an order", case_of_swaps)
    what = "1f1b with BPipe, evictions not waited for"
    try:
        with unwaited():
            compared.gradients(case)
    except CUDASanitizerErrors:
        rank.row(what, "reported, as must be")
    else:
        raise RuntimeError(f"{what}: the sanitizer reported nothing: that it is silent otherwise proves nothing")
    rank.unchecked("what NCCL's own streams do", "the sanitizer sees torch's operations; messages are told it by hand")


def _transformer_engine(rank: Rank, compared: _Compared) -> None:
    hidden, tokens = rank.pick(*_SIZES)
    boundary = torch.empty(tokens, hidden, device=rank.device, dtype=torch.bfloat16)
    for precision, (mlp, scope) in _mlps(rank, hidden).items():

        class Layer(nn.Module):
            def __init__(self, position: int) -> None:
                super().__init__()
                torch.manual_seed(position)
                self.mlp = mlp()  # noqa: B023

            def forward(self, value: Tensor) -> Tensor:
                with scope():  # noqa: B023
                    return cast(Tensor, self.mlp(value))

        plain, balanced = (
            compared.gradients(Case(build("1f1b", Size(STAGES, MICRO_BATCHES), bpipe), Layer, boundary))
            for bpipe in (False, True)
        )
        what = f"1f1b with BPipe, {precision}"
        rank.row(what, "the bits of 1f1b" if plain.bits == balanced.bits else "OTHER BITS than 1f1b")
        stay = ", ".join(f"{name}: {nbytes} bytes" for name, nbytes in sorted(balanced.lasting.items()))
        rank.row(f"{what}: saved tensors that stay, by type", stay or "none")


def _mlps(rank: Rank, hidden: int) -> dict[str, tuple[Callable[[], nn.Module], _Scope]]:
    """By precision, what makes an MLP, and the scope that it computes in. Without a GPU torch's own, in bf16."""
    if rank.place == "cpu":
        rank.unchecked("Transformer Engine's layers, FP8", "there is no GPU: an MLP of torch's stands for them")
        pieces = (nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        return {"bf16": (lambda: nn.Sequential(*map(copy.deepcopy, pieces)).to(torch.bfloat16), nullcontext)}
    te, recipe = import_module("transformer_engine.pytorch"), import_module("transformer_engine.common.recipe")
    autocast = getattr(te, "fp8_autocast", None) or te.autocast

    def made() -> nn.Module:
        return cast(nn.Module, te.LayerNormMLP(hidden, 4 * hidden, params_dtype=torch.bfloat16, device="cuda"))

    found: dict[str, Any] = {"bf16": (made, nullcontext)}
    if torch.cuda.get_device_capability() < (8, 9):
        rank.unchecked("FP8", "this GPU has none")
    elif not hasattr(recipe, "Float8CurrentScaling"):
        rank.unchecked("FP8", "this Transformer Engine scales by history only, which depends on the order of stages")
    else:
        found["FP8"] = (made, lambda: autocast(True, fp8_recipe=recipe.Float8CurrentScaling()))
    return found


class _Compared:
    """Adds a row for a run: whether its gradients are the bits of a loop without a pipeline."""

    def __init__(self, rank: Rank, loops: Loops, sanitized: bool) -> None:
        self._rank, self.loops, self._sanitized = rank, loops, sanitized

    def __call__(self, what: str, case: Case) -> None:
        same = self.gradients(case).bits == without_pipeline(case)
        self._rank.row(what, "the bits of a loop without a pipeline" if same else "OTHER BITS than without")

    def control(self, what: str, case: Case) -> None:
        """The same for what must have other bits."""
        if self.gradients(case).bits == without_pipeline(case):
            raise RuntimeError(f"{what}: changed no bit: that others have the bits they should proves nothing")
        self._rank.row(what, "other bits, as must be")

    def gradients(self, case: Case) -> Result:
        return gradients_of(case, self.loops, self._sanitized)


def _program(rank: Rank, what: str, name: str, bpipe: bool) -> Program | None:
    """A program that evicts where BPipe is asked for; None, with the reason written down, where there is none."""
    spec = find(name)
    given: dict[str, int] = {"chunks": 2} if "chunks" in spec.needs else {}
    given |= {"group_size": 2} if "groups" in spec.needs else {}
    micro_batches = 8 if given else MICRO_BATCHES
    try:
        program = build(name, Size(STAGES, micro_batches, **given), bpipe)
    except ValueError as error:
        rank.unchecked(what, str(error))
        return None
    if bpipe and not any(action.kind == EVICT for row in program.schedule.actions for action in row):
        rank.unchecked(what, "BPipe has nothing to evict under this schedule")
        return None
    return program


def _with_bpipe(rank: Rank) -> Case:
    return Case(build("1f1b", Size(STAGES, MICRO_BATCHES), True), _layers(rank), _boundary(rank))


def _boundary(rank: Rank) -> Tensor:
    hidden, tokens = rank.pick(*_SIZES)
    return torch.empty(1, tokens, hidden, device=rank.device)


def _layers(rank: Rank, reentrant: bool | None = None) -> Callable[[int], nn.Module]:
    hidden, tokens = rank.pick(*_SIZES)
    options = TrainOptions.of(engine="module", layers=8, hidden=hidden, heads=hidden // 16, seq_length=tokens)

    def made(position: int) -> nn.Module:
        layer = initialised_piece(options, 256, 1 + position).to(rank.device)
        return layer if reentrant is None else _Checkpointed(layer, reentrant)

    return made


class _Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self._reentrant = layer, reentrant

    def forward(self, value: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(self.layer, value, use_reentrant=self._reentrant))
