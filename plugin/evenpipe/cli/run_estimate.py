"""``evenpipe run --estimate``: what a script of Megatron-LM will need with these flags, before it is run."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from evenpipe.cli.estimate import show
from evenpipe.cli.parser import UsageError
from evenpipe.descriptions import Cluster, DescriptionError, cluster, framework
from evenpipe.planner.arguments import FlagError, Pipelined, Values, model_of, run_of
from evenpipe.planner.estimate import Estimator
from evenpipe.planner.run import EstimateError
from evenpipe.recipes.flag_needs import Given, without_effect
from evenpipe.recipes.surroundings import expandable, in_megatron, smallest_cluster
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.settings.spelling import FLAGS, in_flags

__all__ = ["estimated"]

_CLUSTER: Final = "a100-80gb"
_UNREAD: Final = (*("cpu_offloading", "overlap_cpu_optimizer_d2h_h2d", "use_torch_fsdp2"),)


def estimated(arguments: Namespace, run: Callable[[Callable[..., None]], None]) -> None:
    """Have ``run`` run the script until its arguments are known to whom it is given, and print the estimate.

    The script's own text is swallowed. UsageError for flags that Megatron or EvenPipe refuses, in one line.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        nodes, notes = _cluster(arguments)
    except DescriptionError as error:
        raise UsageError(f"--cluster {error}") from error
    world = {"WORLD_SIZE": nodes.gpus, "LOCAL_WORLD_SIZE": nodes.gpus_per_node, "RANK": 0, "LOCAL_RANK": 0}
    os.environ.update({name: str(value) for name, value in world.items()})
    # Which Megatron asks for, or under FSDP anything else; estimates go by flags.
    sharded = any(flag in arguments.flags for flag in ("--use-megatron-fsdp", "--use-torch-fsdp2"))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8" if sharded else "1")
    told: list[tuple[Namespace, EvenPipeConfig, Sequence[Sequence[str]] | None]] = []
    with _one_line(arguments.script):
        run(lambda *known: told.append(known))
    if not told:
        raise UsageError(f"{arguments.script}: is no script of Megatron-LM's: it ended before it had its arguments")
    _print(arguments, nodes, notes, *told[0])


def _print(
    arguments: Namespace,
    nodes: Cluster,
    notes: Sequence[str],
    args: Namespace,
    config: EvenPipeConfig,
    layout: Sequence[Sequence[str]] | None,
) -> None:
    name = arguments.script.name
    size = config.group_size
    if size == "auto":
        notes = [*notes, "--group-size auto: chosen while training: this is for 1"]
    unread = [*_unread(args), *([FLAGS.mention("swap", config.swap)] if config.swap is not None else [])]
    notes = [*notes, *(f"{one}: what it changes is not in this estimate" for one in unread)]
    pipelined = Pipelined(config.schedule if config.active else None, config.bpipe, 1 if size == "auto" else size)
    if config.active and config.schedule is None:
        pipelined = pipelined._replace(schedule="1f1b")
    try:
        of = model_of(args, name, causal="bert" not in name.lower())
        asked = run_of(args, pipelined, layout, expandable())
        names = {word.removeprefix("--").partition("=")[0] for word in arguments.flags if word.startswith("--")}
        notes = [*notes, *without_effect(Given(names, Values(args), of, asked))]
        shown = Estimator(of, nodes, framework("megatron"))(asked)
    except (FlagError, DescriptionError) as error:
        raise UsageError(str(error)) from error
    except EstimateError as error:
        raise UsageError(in_megatron(in_flags(error))) from error
    show(shown, of, nodes, arguments.json, in_megatron, *notes)


def _unread(args: Namespace) -> list[str]:
    """Flags that change time or memory in ways that the planner does not know."""
    found = [f"--{name.replace('_', '-')}" for name in _UNREAD if getattr(args, name, None)]
    if getattr(args, "optimizer", "adam") not in ("adam", "sgd", "muon", "dist_muon"):
        found.append(f"--optimizer {args.optimizer}")
    if getattr(args, "muon_num_ns_steps", 5) != 5:
        found.append(f"--muon-num-ns-steps {args.muon_num_ns_steps}")
    if getattr(args, "fp8_recipe", None) == "custom":
        found.append("--fp8-recipe custom")
    return found


def _cluster(arguments: Namespace) -> tuple[Cluster, list[str]]:
    """Return what is named; without sizes, what torchrun says of them, else as few nodes as the flags need."""
    name: str = arguments.cluster or _CLUSTER
    notes = [] if arguments.cluster else [f"no --cluster is named before the script: taken for {_CLUSTER}"]
    found = cluster(name)
    if found.nodes > 1 or re.match(r"[1-9][0-9]*x[1-9]", name) or ".yaml" in name:
        return found, notes
    gpus = found.gpus_per_node
    if (world := os.environ.get("WORLD_SIZE", "")).isdecimal() and int(world) > 1:
        each = int(os.environ.get("LOCAL_WORLD_SIZE", min(int(world), gpus)))
        return cluster(f"{max(1, int(world) // each)}x{each}-{name}"), notes
    name_with_size = smallest_cluster(name, gpus, arguments.flags)
    if name_with_size != f"1x{gpus}-{name}" or not arguments.cluster:
        notes.append(f"as few GPUs as the flags need: name --cluster {name_with_size}, or another size")
    return cluster(name_with_size), notes


@contextlib.contextmanager
def _one_line(script: Path) -> Iterator[None]:
    """Swallow what Megatron prints; raise UsageError, one line, where it refuses.

    The line is Megatron's own last one or, where it fails otherwise, its error.
    """
    with tempfile.TemporaryFile("w+") as said:
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                yield
        except SystemExit as error:
            if error.code not in (None, 0):
                said.seek(0)
                last = (said.read().strip().splitlines() or [f"{script}: ended with status {error.code}"])[-1]
                raise UsageError(re.sub(r"^[\w.]+: error: ", "", last)) from None
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())
            if isinstance(error, ModuleNotFoundError):
                text += ": install what the script needs, such as pip install regex six pyyaml pybind11"
            raise UsageError(f"{script}: {text or f'Megatron refuses these flags: {where.line}'}") from None
