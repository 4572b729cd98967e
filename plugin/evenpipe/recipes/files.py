"""All files of a recipe, written together or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from evenpipe.recipes.deepspeed import flag_groups as deepspeed_flags
from evenpipe.recipes.deepspeed import training_files
from evenpipe.recipes.megatron import flag_groups as megatron_flags
from evenpipe.recipes.megatron import script_of
from evenpipe.recipes.readme import readme_of
from evenpipe.recipes.recipe import Recipe, RecipeError
from evenpipe.recipes.rendering import Group, render

__all__ = [
    "Exported",
    "environment_of",
    "files_of",
    "job_of",
    "launch_files",
    "train_script",
    "write_files",
]


class Exported(NamedTuple):
    """``reason``: a comment, a line each. ``given_first``: what the environment has already comes before it."""

    name: str
    value: str
    reason: tuple[str, ...]
    given_first: bool = False


def environment_of(recipe: Recipe) -> list[Exported]:
    """In the order of the file."""
    return list(_environment(recipe))


def _environment(recipe: Recipe) -> Iterator[Exported]:
    run = recipe.run
    if run.queues == "one":
        yield Exported(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "1",
            (
                "One queue for kernels: a collective of tensor parallelism starts before the matrix product that hides",
                "it. Megatron asks for it on all GPUs before Blackwell.",
            ),
        )
    elif run.stages > 1:
        yield Exported(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "32",
            ("Compute, each link and each group have a stream. With CUDA's 8 queues some would wait for others.",),
        )
    yield Exported(
        "PYTORCH_CUDA_ALLOC_CONF",
        "expandable_segments:True",
        ("Micro-batches come and go in several sizes: segments that can grow leave fewer gaps.",),
    )
    yield Exported(
        "OMP_NUM_THREADS",
        "4",
        ("CPU threads of a process: with one for each core, a node has eight times too many.",),
        given_first=True,
    )
    if recipe.cluster.nodes > 1:
        yield Exported(
            "NCCL_IB_TIMEOUT",
            "22",
            ("InfiniBand waits 17 s (4.1 µs × 2^22) for a busy switch before it gives a message up.",),
        )
    if recipe.settings.interface:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            reason = "Nodes have several networks: this is the one between them."
            yield Exported(name, recipe.settings.interface, (reason,) if name.startswith("NCCL") else ())


_TORCHRUN: Final = (
    'exec torchrun --nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK"',
    '    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"',
)


class Assigned(NamedTuple):
    """A variable of the script; in ``addresses`` its value is bash's to expand."""

    name: str
    value: str
    comment: str


def train_script(recipe: Recipe) -> str:
    """train.sh."""
    per_node = recipe.launcher != "deepspeed"
    groups = megatron_flags(recipe) if recipe.framework == "megatron" else deepspeed_flags(recipe)
    return render(
        "train.sh",
        title=recipe.title,
        usage=_usage(recipe),
        paths=list(_paths(recipe)),
        per_node=per_node,
        in_folder=recipe.framework == "deepspeed",
        nodes=recipe.cluster.nodes,
        gpus_per_node=recipe.cluster.gpus_per_node,
        addresses=list(_addresses(recipe)) if per_node else [],
        environment=environment_of(recipe),
        groups=groups,
        command=_command(recipe, groups, per_node),
    )


def launch_files(recipe: Recipe) -> dict[str, str]:
    """What starts train.sh, where something else than a user does."""
    if recipe.launcher == "slurm":
        return {
            "launch.sbatch": render("launch.sbatch", title=recipe.title, directives=list(_directives(recipe))),
        }
    if recipe.launcher == "deepspeed":
        nodes, gpus = recipe.cluster.nodes, recipe.cluster.gpus_per_node
        hosts = "--hostfile hostfile" if nodes > 1 else f"--num_gpus {gpus}"
        script = render(
            "launch.sh",
            title=recipe.title,
            nodes=nodes,
            master_addr=recipe.hosts[0],
            master_port=recipe.settings.master_port,
            where=f'{hosts} --master_addr "$MASTER_ADDR"' if nodes > 1 else hosts,
        )
        found = {"launch.sh": script}
        if nodes > 1:
            found["hostfile"] = "".join(f"{host} slots={gpus}\n" for host in recipe.hosts)
        return found
    return {}


def _usage(recipe: Recipe) -> list[str]:
    nodes = recipe.cluster.nodes
    if recipe.launcher == "slurm":
        return ["launch.sbatch runs it once on each node."]
    if recipe.launcher == "deepspeed":
        return ["launch.sh has every process run it."]
    if recipe.launcher == "kubernetes":
        return ["Every pod runs it."]
    if nodes == 1:
        return ["On the node:  bash train.sh"]
    return [f"On each of the {nodes} nodes, N from 0 to {nodes - 1}:  MASTER_ADDR=<node 0> NODE_RANK=<N> bash train.sh"]


def _paths(recipe: Recipe) -> Iterator[Assigned]:
    if recipe.framework == "megatron":
        release = recipe.settings.release
        yield Assigned("MEGATRON_LM", recipe.megatron_lm, f"A checkout of Megatron-LM {release}, on every node.")
        files = "Prefix of the .bin and .idx that tools/preprocess_data.py of Megatron-LM writes."
        of = "Folder of the Hugging Face tokenizer." if recipe.kind == "gpt" else "The vocabulary, a word a line."
        if not recipe.mock:
            yield Assigned("DATA", recipe.data, files)
            yield Assigned("TOKENIZER", recipe.tokenizer, of)
    elif not recipe.mock:
        yield Assigned("DATA", recipe.data, "Prefix of the .bin with the tokens, one after the other (data.py).")
    yield Assigned("CHECKPOINTS", recipe.checkpoints, "On a file system that all nodes see; a run goes on from here.")


def _addresses(recipe: Recipe) -> Iterator[Assigned]:
    one, last, port = recipe.cluster.nodes == 1, recipe.cluster.nodes - 1, recipe.settings.master_port
    if recipe.launcher == "slurm":
        yield Assigned(
            "NODE_RANK",
            '${SLURM_NODEID:?"is set by srun: start launch.sbatch"}',
            "Set by Slurm, and the others by launch.sbatch.",
        )
        yield Assigned("MASTER_ADDR", '${MASTER_ADDR:?"is set by launch.sbatch"}', "")
        yield Assigned("MASTER_PORT", '${MASTER_PORT:?"is set by launch.sbatch"}', "")
    elif recipe.launcher == "kubernetes":
        yield Assigned("NODE_RANK", '${PET_NODE_RANK:-${RANK:?"is set by the operator"}}', "The operator sets them.")
        yield Assigned("MASTER_ADDR", '${MASTER_ADDR:?"is set by the operator"}', "")
        yield Assigned("MASTER_PORT", f"${{MASTER_PORT:-{port}}}", "")
    elif one:
        yield Assigned("NODE_RANK", "0", "")
        yield Assigned("MASTER_ADDR", "127.0.0.1", "")
        yield Assigned("MASTER_PORT", f"${{MASTER_PORT:-{port}}}", "Another one for each job on this node.")
    else:
        yield Assigned(
            "NODE_RANK", f'${{NODE_RANK:?"which node is this, from 0 to {last}?"}}', "Which of them this is."
        )
        yield Assigned(
            "MASTER_ADDR", '${MASTER_ADDR:?"name or address of node 0, as the others know it"}', "Where they meet."
        )
        yield Assigned("MASTER_PORT", f"${{MASTER_PORT:-{port}}}", "Free on node 0, and the same on all.")


def _command(recipe: Recipe, groups: Sequence[Group], per_node: bool) -> list[str]:
    start = _TORCHRUN if per_node else ()
    python = "    -m" if per_node else "exec python -u -m"
    script = f'run "$MEGATRON_LM/{script_of(recipe)}"' if recipe.framework == "megatron" else "run --deepspeed train.py"
    given = " ".join(f'"${{{group.name}[@]}}"' for group in groups)
    return [*start, f"{python} evenpipe {script}", f"    {given}"]


def _directives(recipe: Recipe) -> Iterator[tuple[str, str | int | None]]:
    given, cluster = recipe.settings, recipe.cluster
    yield "job-name", recipe.name
    for option in ("partition", "account", "time"):
        if getattr(given, option):
            yield option, getattr(given, option)
    yield "nodes", cluster.nodes
    yield "ntasks-per-node", 1
    yield "gpus-per-node", cluster.gpus_per_node
    yield "exclusive", None
    yield "output", "%x-%j.log"


def job_of(recipe: Recipe, files: Mapping[str, str]) -> str:
    """One document of YAML after the other: a master, and a worker for each further node."""
    given, nodes = recipe.settings, recipe.cluster.nodes
    return render(
        "job.yaml",
        title=recipe.title,
        name=recipe.name,
        configuration=f"{recipe.name[:56].rstrip('-')}-recipe",
        namespace=given.namespace,
        files=files,
        roles=[("Master", 1)] + [("Worker", nodes - 1)] * (nodes > 1),
        gpus_per_node=recipe.cluster.gpus_per_node,
        image=given.image,
        master_port=given.master_port,
        mount=given.mount,
        claim=given.claim or recipe.name,
    )


def files_of(recipe: Recipe) -> dict[str, str]:
    """Texts by name. Raises EstimateError for a run that cannot be, RecipeError for values that no file can carry."""
    run = {"train.sh": train_script(recipe)}
    if recipe.framework == "deepspeed":
        run |= training_files(recipe)
    started = {"job.yaml": job_of(recipe, run)} if recipe.launcher == "kubernetes" else run | launch_files(recipe)
    return started | {"README.md": readme_of(recipe), "recipe.json": json.dumps(recipe.to_json(), indent=2) + "\n"}


def write_files(folder: Path, files: Mapping[str, str], force: bool = False) -> None:
    """Put texts at their names in a folder, which is made. Scripts can be run.

    All are written beside it first; then each takes its name at once, so that a reader sees an old file or a new one,
    never a part. Raises RecipeError, and leaves everything as it was, where one is there already and ``force`` is not
    given, and OSError where they cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"--out {folder}: is a file: name a folder")
    there = [name for name in files if os.path.lexists(folder / name)]
    if there and not force:
        raise RecipeError(f"--out {folder}: has {', '.join(there)}: name another folder, or write over it with --force")
    if others := [name for name in there if not (folder / name).is_file()]:
        raise RecipeError(f"--out {folder}: {', '.join(others)} is no regular file: name another folder")
    made = not folder.exists()
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".evenpipe-recipe-", dir=folder.parent))
    try:
        for name, text in files.items():
            path = beside / name
            with path.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            path.chmod(0o755 if text.startswith("#!") else 0o644)
        if made:
            beside.chmod(0o755)
            beside.rename(folder)
            return
        for name in files:
            (beside / name).replace(folder / name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
