"""The list of upstream symbols has all that the code imports, calls, or sets on objects of others, and nothing else."""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import logging
import re
from collections import Counter, namedtuple
from collections.abc import Iterable, Iterator, Set
from functools import cache
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from typing import Final

import pydantic
import pytest
import torch
import torch.distributed as dist

import evenpipe
from evenpipe.deepspeed.catalogue import catalogue as of_deepspeed
from evenpipe.megatron_lm.catalogue import catalogue as of_megatron
from evenpipe.upstream.source import path_of

SOURCE: Final = Path(evenpipe.__file__).parent
#: What holds objects of other packages, and what only reads files, draws or computes.
FRAMEWORKS: Final = ("megatron", "megatron_lm", "fitting", "deepspeed")
ROOMS: Final = (*FRAMEWORKS, "two_bw", "runtime", "torch", "train")
PACKAGES: Final = ("megatron", "deepspeed")
LISTS: Final = ("symbols.py", "two_bw_symbols.py", "supported.py")

#: An instance or class in its own methods; `ctx` of an autograd function, which is made to be written to.
OWN: Final = frozenset(("self", "cls", "ctx"))
#: By file, names of objects of EvenPipe, of Python or of rich: what is set on them is nobody else's business.
OURS: Final = {
    "deepspeed/adaptive.py": ("_watch",),
    "deepspeed/measuring.py": ("executor", "_watch"),
    "deepspeed/engine.py": ("cut",),
    "deepspeed/planned/stage.py": ("executor",),
    "deepspeed/two_bw/drain_at_end.py": ("destroy_process_group",),
    "megatron/bridge.py": ("schedule",),
    "fitting/source.py": ("given",),
    "megatron/cpu_mode.py": ("logger",),
    "megatron_lm/layout_model.py": ("sys",),
    "megatron/schedule.py": ("executor",),
    "megatron_lm/measured.py": ("schedule",),
    "megatron/searched.py": ("_watch",),
    "megatron_lm/log.py": ("_schedule", "schedule"),
    "megatron/train_engine/engine.py": ("adaptive",),
    "runtime/host_memory.py": ("block",),
    "runtime/memory.py": ("slot",),
    "runtime/heartbeat.py": ("_life",),
    "runtime/store.py": ("coming", "counter", "leaving", "saved"),
    "torch/capped.py": ("pipeline",),
    "torch/two_bw.py": ("pipeline",),
    "train/muon.py": ("optimizer",),
    "torch/hf/callbacks.py": ("control", "handler", "state"),  # transformers' own for callbacks, made there
    "torch/hf/plans.py": ("config",),
    "torch/hf/trainer.py": ("pipeline", "state"),
    "torch/pipeline.py": ("_keywords",),
    "torch/scaling.py": ("pipeline",),
    "torch/tuned.py": ("_watch", "executor", "pipeline"),
    "train/plain.py": ("pipeline",),
    "torch/planned.py": ("executor",),
    "train/saver.py": ("draft",),
}
#: Settings as a script's parser has made them, which have no class that could be looked at.
SETTINGS: Final = frozenset(("args", "checked", "settings"))
#: torch's documented ways to give a tensor other memory, and a gradient, and to tell a module that it is evaluated.
TENSORS: Final = frozenset(("data", "grad", "training"))
#: What a tensor or a process group of our own is marked with for others to see.
MARKS: Final = frozenset(
    (
        "_zero_padding",  # DeepSpeed's, on a copy of what has it; some releases have none
        "_opt_called",  # torch's, by which its learning-rate schedulers know that an optimizer steps
        *("_timeout", "max_ctas", "global_ranks_in_group", "group_name"),  # options of a group of ours
        "truth",  # of an engine of ours
        "forward",  # torch's, of a user's layer for one batch: `Module.__call__` looks it up on the instance
        "generation_config",  # of a model that we have made, as transformers' `from_pretrained` sets it
        *("main_grad", "grad_added_to_main_grad"),  # of a parameter, as Megatron's layers set them in a backward
    )
)
#: Where the name is not in the statement: what has to be in the list, if anything.
COMPUTED: Final = {
    ("runtime/weight_versions.py", "owner"): ("param_data",),
    ("megatron/cpu_mode.py", "dispatcher"): ("input_splits", "output_splits"),
    ("megatron/schedule.py", "groups"): (),  # made here
    ("megatron/recomputing.py", "config"): (),  # settings, for one forward
    ("deepspeed/arrange.py", "module"): (),  # layers, by number
    ("deepspeed/planned/cutting.py", "module"): ("tied_modules", "loss_fn"),
    ("runtime/weight_gradients.py", "weight"): (),  # a mark of ours
    ("runtime/linear.py", "one"): (),  # the same
    ("runtime/compiled_linear.py", "untyped_storage()"): (),  # the same
}


#: Types of Python, torch and pydantic whose objects the code for Megatron and DeepSpeed calls, and objects of such.
FAMILIAR: Final = (
    *("", 0, {}, [], set[int](), (), Path(), re.compile(""), namedtuple("namedtuple", ""), pydantic.BaseModel),
    *(argparse.ArgumentParser, BaseException(), contextlib.ExitStack, inspect.BoundArguments, logging.Logger),
    *(Counter, Distribution, Queue),
    *(torch.Tensor, torch.UntypedStorage, torch.nn.Module(), torch.optim.Optimizer, dist.ProcessGroup, dist.Work),
)
FAMILIAR_NAMES: Final = frozenset(name for each in FAMILIAR for name in dir(each))

#: Megatron calls these on what 2bw has prepared, and has prepared before 2bw goes on.
BETWEEN: Final = frozenset(("start_param_sync", "finish_grad_sync"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def parsed(*rooms: str) -> Iterator[tuple[Path, ast.Module]]:
    for room in rooms:
        for path in sorted((SOURCE / room).rglob("*.py")):
            yield path.relative_to(SOURCE), tree_of(path)


def listed() -> set[str]:
    """All symbols, and the classes that they are attributes of."""
    symbols = {symbol for item in (*of_megatron(), *of_deepspeed()) for symbol in item.symbols}
    return symbols | {symbol.rpartition(".")[0] for symbol in symbols if "." in symbol.partition(":")[2]}


def is_module(name: str, known: set[str]) -> bool:
    """Of a package that is installed, or that the list knows as one (megatron.training is in few wheels)."""
    found = find_spec(name.partition(".")[0])
    folders = [Path(folder).parent for folder in (found.submodule_search_locations or ()) if found] if found else []
    return any(path_of(folder, name) for folder in folders) or any(symbol.startswith(f"{name}:") for symbol in known)


def imported(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Symbols that are imported, and attributes of imported modules and classes that are used, as the list has them."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(alias.name.partition(".")[0] in PACKAGES for alias in node.names), "import from it"
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] not in PACKAGES or node.level:
            continue
        for alias in node.names:
            whole, symbol = f"{node.module}.{alias.name}", f"{node.module}:{alias.name}"
            bound[alias.asname or alias.name] = whole if is_module(whole, known) and symbol not in known else symbol
    yield from (symbol for symbol in bound.values() if ":" in symbol)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            owner = bound[node.value.id]
            yield f"{owner}{'.' if ':' in owner else ':'}{node.attr}"


def test_what_is_imported_is_in_the_list() -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("deepspeed")
    known, versions = listed(), {"megatron.core:__version__"}
    trees = parsed(*FRAMEWORKS)
    reached = {(str(path), symbol) for path, tree in trees for symbol in imported(tree, known)}
    assert len(reached) > 90
    assert {(path, symbol) for path, symbol in reached if symbol not in known | versions} == set()


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement sets or deletes; of a list or tuple, each part."""
    if isinstance(node, ast.Assign | ast.Delete):
        given = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        given = [node.target]
    else:
        return
    for target in given:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def set_elsewhere(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The name of an object that is not one of ours, and the attribute that is set on it."""
    for node in ast.walk(tree):
        for target in targets(node):
            if isinstance(target, ast.Attribute):
                yield ast.unparse(target.value).rpartition(".")[2], target.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            owner, name = node.args[:2]
            yield ast.unparse(owner).rpartition(".")[2], name.value if isinstance(name, ast.Constant) else "?"


def test_what_is_set_on_objects_of_others_is_in_the_list_with_a_reason() -> None:
    given = {item.symbols[0] for item in (*of_megatron(), *of_deepspeed()) if item.is_replaced}
    known = {symbol.rpartition(":")[2].rpartition(".")[2] for symbol in given}
    found = {
        (str(path), owner, name)
        for path, tree in parsed(*ROOMS)
        for owner, name in set_elsewhere(tree)
        if owner not in OWN | SETTINGS and name not in TENSORS | MARKS
    }
    ours = {(path, owner) for path, owners in OURS.items() for owner in owners}
    assert ours - {(path, owner) for path, owner, _ in found} == set()
    found = {(path, owner, name) for path, owner, name in found if (path, owner) not in ours}
    assert len(found) > 40
    computed = {(path, owner) for path, owner, name in found if name == "?"}
    assert computed == set(COMPUTED)
    assert {name for names in COMPUTED.values() for name in names} <= known
    assert {each for each in found if each[2] not in known | {"?"}} == set()


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in OWN


def defined(trees: Iterable[ast.Module]) -> Iterator[str]:
    """The names of functions and classes, and of what modules, classes and instances have."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.Module | ast.ClassDef):
            assigned = (target for one in node.body for target in targets(one))
            yield from (target.id for target in assigned if isinstance(target, ast.Name))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def root(node: ast.expr) -> str:
    """The name that an expression of attributes, items and calls starts with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def familiar_imports(tree: ast.Module) -> Iterator[str]:
    """Names of what is imported from Python, torch and the like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in (*PACKAGES, "evenpipe"):
            yield from (alias.asname or alias.name for alias in node.names)


def used_elsewhere(tree: ast.Module, ours: Set[str]) -> Iterator[str]:
    """Methods that are called, and private attributes that are read, which are not EvenPipe's own.

    EvenPipe's are `ours`, by name; private ones of another object than `self` are those of the same file.
    """
    private, modules = set(defined([tree])), set(familiar_imports(tree))
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load) or node.attr in FAMILIAR_NAMES:
            continue
        is_private = node.attr.startswith("_") and not node.attr.endswith("__")
        is_of_other = is_private and not (is_own(node.value) or root(node) == "super")
        if node.attr in (private if is_of_other else ours) or not (is_private or node in called):
            continue
        if root(node) not in modules:
            yield node.attr


def test_what_is_called_and_what_is_read_privately_is_in_the_list() -> None:
    known, ours = {re.split("[:.]", symbol)[-1] for symbol in listed()}, set(defined(tree for _, tree in parsed(".")))
    trees = [(path, tree) for path, tree in parsed(*FRAMEWORKS) if path.name not in LISTS]
    used = {(str(path), name) for path, tree in trees for name in used_elsewhere(tree, ours)}
    assert len(used) > 60
    assert {(path, name) for path, name in used if name not in known} == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("optimizer._new_private()", ["_new_private"]),
        ("optimizer.parts[0]._new_private", ["_new_private"]),
        ("self.optimizer.new_public()", ["new_public"]),
        ("super().new_public(optimizer)", ["new_public"]),
        ("from megatron.core import new\nnew().new_public()", ["new_public"]),
        ("stage._of_another_file, self._of_another_file", ["_of_another_file"]),
        ("def _own(): ...\nstage._own()", []),
        ("stage.ours(optimizer.new_public)", []),
        ("import torch\ntorch.new._private()", []),
        ("tensor.view(1).tolist()", []),
    ],
)
def test_a_new_call_of_others_is_reported(source: str, found: list[str]) -> None:
    assert list(used_elsewhere(ast.parse(source), {"ours", "_of_another_file"})) == found


def test_nothing_is_in_the_list_that_no_code_uses() -> None:
    """Names, whichever way they are written: imports, attributes, and texts (`getattr`, targets of patches)."""
    used: set[str] = set()
    for path, tree in parsed(*FRAMEWORKS, "tuner"):
        if path.name in LISTS:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.alias | ast.FunctionDef):
                used.add(node.name)
            elif isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.keyword):
                used.add(node.arg or "")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.update(node.value.replace(":", ".").split("."))
    listed_members = {symbol.rpartition(".")[0] for symbol in listed() if "." in symbol.partition(":")[2]}
    called = {item.symbols[0] for item in (*of_megatron(), *of_deepspeed()) if not item.is_replaced} - listed_members
    assert {symbol for symbol in called if symbol.replace(":", ".").rpartition(".")[2] not in used | BETWEEN} == set()
