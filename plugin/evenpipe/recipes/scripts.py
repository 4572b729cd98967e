"""Scripts: what a node, or a process, runs, and what starts it on all nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from evenpipe.recipes.deepspeed import flag_groups as deepspeed_flags
from evenpipe.recipes.environment import environment_of
from evenpipe.recipes.flags import Group
from evenpipe.recipes.megatron import flag_groups as megatron_flags
from evenpipe.recipes.megatron import script_of
from evenpipe.recipes.recipe import FRAMEWORKS, LAUNCHERS, Recipe
from evenpipe.recipes.rendering import render

__all__ = ["launch_files", "title_of", "train_script"]

_TORCHRUN: Final = (
    'exec torchrun --nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK"',
    '    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"',
)


class Assigned(NamedTuple):
    """A variable of the script; in ``addresses`` its value is bash's to expand."""

    name: str
    value: str
    comment: str


def title_of(recipe: Recipe) -> str:
    by = LAUNCHERS[recipe.launcher]
    of = FRAMEWORKS[recipe.framework]
    release = f" {recipe.settings.release}" if recipe.framework == "megatron" else ""
    return f"{recipe.model.name} on {recipe.cluster.name}: {of}{release} with EvenPipe, started by {by}."


def train_script(recipe: Recipe) -> str:
    """train.sh."""
    per_node = recipe.launcher != "deepspeed"
    groups = megatron_flags(recipe) if recipe.framework == "megatron" else deepspeed_flags(recipe)
    return render(
        "train.sh",
        title=title_of(recipe),
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
            "launch.sbatch": render("launch.sbatch", title=title_of(recipe), directives=list(_directives(recipe))),
        }
    if recipe.launcher == "deepspeed":
        nodes, gpus = recipe.cluster.nodes, recipe.cluster.gpus_per_node
        hosts = "--hostfile hostfile" if nodes > 1 else f"--num_gpus {gpus}"
        script = render(
            "launch.sh",
            title=title_of(recipe),
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
