"""``evenpipe recipe``: a planned run as files that start it; and what no longer fits of files that were edited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import REMAINDER, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenpipe.cli.estimate import add_model, model_and_cluster
from evenpipe.cli.fit import fit_schedule
from evenpipe.cli.parser import Commands, UsageError, add_command, sentence
from evenpipe.cli.plan import SEARCHED, add_search_options, engine_of, question_from, search_shown
from evenpipe.cli.shown import console_of, print_prose
from evenpipe.cli.values import sample_count
from evenpipe.deepspeed.section import SectionError, section_of
from evenpipe.descriptions import Cluster, DescriptionError, Device, Model, framework
from evenpipe.planner.estimate import Estimate
from evenpipe.planner.run import EstimateError, Run
from evenpipe.recipes import Recipe, RecipeError, Settings
from evenpipe.recipes.checking import Checked, check
from evenpipe.recipes.files import files_of, write_files
from evenpipe.recipes.reading import Written, read_folder
from evenpipe.recipes.recipe import FRAMEWORKS, LAUNCHERS, read_plan, recipe_of_plan, run_of_plan
from evenpipe.recipes.surroundings import in_megatron
from evenpipe.recipes.unsupported import refuse, refuse_before_planning, refuse_divided
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.settings.spelling import in_flags

__all__ = ["add_to", "show_check"]


def show_check(folder: Path, checkout: Path | None, as_json: bool = False) -> int:
    """Print problems and what was not looked at; 1 where there are problems. UsageError for what is no recipe."""
    try:
        written = read_folder(folder)
    except RecipeError as error:
        raise UsageError(f"--check {error}") from error
    found = check(written, engine_of(framework(written.about.framework)), _section)
    problems, notes = list(found.problems), list(found.notes)
    if written.about.framework == "megatron":
        problems = [in_megatron(line) for line in problems]
        if found.script:
            said, note = _by_megatron(written, found, checkout)
            problems += said
            notes += note
    problems, notes = ([" ".join(line.split()) for line in lines] for lines in (problems, notes))
    estimate = None if problems else found.estimate
    device = written.about.cluster.device
    if as_json:
        about = {"format": "evenpipe.recipe-check/1", "folder": str(folder), "problems": problems, "notes": notes}
        print(json.dumps(about | {"predicted": None if estimate is None else _predicted(estimate, device)}))
        return 1 if problems else 0
    console = console_of()
    for line in problems:
        print_prose(console, line)
    for line in notes:
        print_prose(console, f"note: {line}")
    if estimate is not None:
        most, gib = estimate.fullest_gib(device)
        fits = f"fits: {most:.1f} of {gib:g} GiB, {estimate.iteration_ms:,.0f} ms an iteration, MFU {estimate.mfu:.1%}"
        print_prose(console, f"{folder}: {fits}")
    return 1 if problems else 0


def _predicted(estimate: Estimate, device: Device) -> dict[str, Any]:
    most, gib = estimate.fullest_gib(device)
    return {
        "fits": estimate.fits,
        "memory_gib": most,
        "device_gib": gib,
        "iteration_ms": estimate.iteration_ms,
        "uncertainty": estimate.uncertainty._asdict(),
        "mfu": estimate.mfu,
    }


def _section(configuration: Mapping[str, Any]) -> EvenPipeConfig | None:
    try:
        return section_of(configuration)
    except SectionError as error:
        raise RecipeError(f"ds_config.json: {error}") from None


def _by_megatron(written: Written, found: Checked, checkout: Path | None) -> tuple[list[str], list[str]]:
    """Problems that its own parser and `validate_args` find, and what to say if they were not asked.

    They are code of the checkout, so that only one is asked that the user has named, never the one in what is checked.
    """
    script = Path(found.script)
    if checkout is None:
        named = f"name a checkout that you trust with --megatron-lm, such as {script.parent}"
        return [], [f"flags were not given to Megatron-LM's own parser, which would execute its code: {named}"]
    path = checkout / script.name
    if not (path.is_file() and (path.parent / "megatron" / "training").is_dir()):
        raise UsageError(f"--megatron-lm {checkout}: has no {script.name} and megatron/training: name a checkout")
    nodes = found.cluster or written.about.cluster
    flags = list(found.flags)
    if not any(word.partition("=")[0] == "--vocab-size" for word in flags):
        flags += ["--vocab-size", str(written.about.model.vocabulary)]
    asked = ["--estimate", "--cluster", f"{nodes.nodes}x{nodes.gpus_per_node}-a100-80gb", str(path), *flags]
    command = [sys.executable, "-m", "evenpipe", "run", *asked]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if not done.returncode:
        return [], []
    last = (done.stderr.strip().splitlines() or ["ended without a word"])[-1]
    said = last.removeprefix("evenpipe run: error: ")
    return ([] if said in found.problems else [f"{path}: {said}"]), []


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    settings = "; ".join(
        f"{name}{f' ({field.description})' if field.description else ''}"
        for name, field in Settings.model_fields.items()
    )
    parser = add_command(
        commands,
        "recipe",
        usage="evenpipe recipe --plan PLAN.json --out DIR"
        "\n                       [--set KEY=VALUE ...] [--force] [--json]"
        "\n       evenpipe recipe gpt|bert (--model NAME | --hf PATH) --cluster NAME"
        "\n                       --framework NAME --launcher NAME --out DIR"
        "\n                       --global-batch-size G"
        "\n                       [--set KEY=VALUE ...] [--force] [--json]"
        "\n       evenpipe recipe --check DIR [--megatron-lm PATH] [--json]"
        "\n       evenpipe recipe [--cluster NAME] [--json]"
        "\n                       --from-flags torchrun ... pretrain_gpt.py [FLAGS ...]",
        description=f"{sentence('recipe')} A README beside them says what is predicted.",
        epilog=f"Settings: {settings}. --json prints evenpipe.recipe/1, with --check "
        "evenpipe.recipe-check/1, with --from-flags evenpipe.fit/1.",
    )
    parser.add_argument("kind", nargs="?", choices=("gpt", "bert"), help="what is trained")
    group = parser.add_argument_group("what and where")
    add_model(group, required=False)
    group.add_argument("--cluster", metavar="NAME", help="NODESxGPUS-NAME, or PATH.yaml[:NAME][@NODESxGPUS]")
    group.add_argument("--framework", choices=tuple(FRAMEWORKS))
    group.add_argument("--launcher", choices=tuple(LAUNCHERS))
    group = parser.add_argument_group("how: a plan, or a search")
    first = "the first of what `evenpipe plan --out` wrote; model, cluster and the like are the plan's unless given"
    group.add_argument("--plan", type=Path, metavar="PLAN.json", help=first)
    group.add_argument("--global-batch-size", "--global-batch", type=sample_count, metavar="G", help="samples, at most")
    add_search_options(parser, "what a search may choose of, without a plan")
    group = parser.add_argument_group("files")
    group.add_argument("--out", type=Path, metavar="DIR", help="a folder, which is made")
    group.add_argument(
        *("--set", "-s"), action="append", default=[], dest="assignments", metavar="KEY=VALUE", help="a setting, below"
    )
    group.add_argument("--force", action="store_true", help="write over files that are there")
    group.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    group = parser.add_argument_group("instead")
    group.add_argument("--check", type=Path, metavar="DIR", help="say what no longer fits of a recipe that was edited")
    group.add_argument(
        "--megatron-lm",
        type=Path,
        metavar="PATH",
        help="--check: the checkout whose parser is asked, which executes its code",
    )
    group.add_argument(
        "--from-flags", nargs=REMAINDER, metavar="LINE", help="as `evenpipe fit --keep ...`: the schedule alone changes"
    )
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> int | None:
    if arguments.check is not None:
        return show_check(arguments.check, arguments.megatron_lm, arguments.json)
    if arguments.from_flags is not None:
        fit_schedule(arguments.from_flags, arguments.cluster, arguments.json)
        return None
    if arguments.plan is not None:
        _complete(arguments)
    if arguments.kind is None:
        raise UsageError("gpt or bert: which is trained? Or give --check DIR, or --from-flags and a line")
    needed = ("model", "cluster", "framework", "launcher", "out")
    named = {"model": arguments.hf}
    missing = [f"--{option}" for option in needed if getattr(arguments, option) is None and named.get(option) is None]
    if missing:
        raise UsageError(f"missing {', '.join(missing)} (see evenpipe recipe --help)")
    _write(arguments)
    return None


def _complete(arguments: Namespace) -> None:
    """Give options that say what and where, and are not given, the values of the plan's own command of a recipe."""
    try:
        command = recipe_of_plan(arguments.plan)
    except RecipeError as error:
        raise UsageError(str(error)) from error
    if command is None:
        return  # no command of a recipe: what is missing must be given
    planned = arguments.parser.parse_args(command)
    for names in (("kind",), ("model", "hf"), ("seq_length",), ("cluster",), ("framework",), ("launcher",)):
        if all(getattr(arguments, name) is None for name in names):
            for name in names:
                setattr(arguments, name, getattr(planned, name))


def _write(arguments: Namespace) -> None:
    try:
        recipe = _recipe(arguments)
        files = files_of(recipe)
    except (DescriptionError, RecipeError) as error:
        raise UsageError(str(error)) from error
    except EstimateError as error:
        raise UsageError(in_flags(error)) from error
    try:
        write_files(arguments.out, files, arguments.force)
    except RecipeError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(
            f"--out {arguments.out}: {error.strerror or error}: name a folder that can be written"
        ) from error
    found = recipe.estimate
    if arguments.json:
        about = {"format": "evenpipe.recipe/1", "folder": str(arguments.out), "files": list(files)}
        print(json.dumps(about | {"predicted": _predicted(found, recipe.cluster.device)}))
        return
    most, gib = found.fullest_gib(recipe.cluster.device)
    needs = f"{most:.1f} of {gib:g} GiB" if found.fits else f"does not fit: {found.reason}"
    print(f"{arguments.out}: {', '.join(files)}")
    print(f"an iteration takes {found.iteration_ms:,.0f} ms ({found.uncertainty}), MFU {found.mfu:.1%}; {needs}")


def _recipe(arguments: Namespace) -> Recipe:
    settings = Settings.of(arguments.assignments)
    of, nodes = model_and_cluster(arguments)
    refuse_before_planning(arguments.kind, of, arguments.framework, settings)
    run, planned_for = _planned(arguments, of, nodes)
    recipe = Recipe.of(of, nodes, run, arguments.framework, arguments.launcher, settings, planned_for)
    refuse(recipe, engine_of(framework(arguments.framework)))
    return recipe


def _planned(arguments: Namespace, of: Model, nodes: Cluster) -> tuple[Run, str]:
    """Return the run, and the framework whose defaults it has."""
    if arguments.plan is not None:
        options = ("global_batch_size", *SEARCHED)
        given = [f"--{name.replace('_', '-')}" for name in options if getattr(arguments, name) is not None]
        if given or not arguments.bpipe:
            raise UsageError(f"{(given or ['--no-bpipe'])[0]}: the plan says it: leave it out, or leave --plan out")
        plan = read_plan(arguments.plan, of, nodes.name)
        return run_of_plan(plan.plans[0]), plan.framework
    if arguments.global_batch_size is None:
        raise UsageError("--global-batch-size: how many samples has an iteration? Give that, or --plan PLAN.json")
    if arguments.framework == "deepspeed":
        refuse_divided("deepspeed", arguments.tensor_parallel or 1, arguments.context_parallel or 1)
        arguments.tensor_parallel = arguments.context_parallel = 1
    return search_shown("recipe", question_from(arguments, of, nodes), 1).plans[0].run, arguments.framework
