"""What a model's forward does that its graph would not: gradients of its own, and Python state that changes."""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import random
import re
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import Function
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from evenpipe.partition.trace.state import Leaf, functions_of, leaves_of

__all__ = ["effect_of"]

_OWN_GRADIENT: Final = (
    "would lose the gradient that it defines: write it in torch's operations, as x + (f(x) - x).detach(), or make it a "
    "torch.library.custom_op with register_autograd"
)
_REENTRANT: Final = "what is recomputed would lose its gradient: checkpoint it with use_reentrant=False"
_HOOK: Final = "a hook on a gradient would not be called: leave it out of what is planned"
_STATE: Final = (
    "changes with every forward, and a plan's would not: make it a buffer that is changed in place, or take it out"
)
_RANDOM: Final = "forward draws Python's or NumPy's random numbers, which a plan would draw once: draw them with torch"
#: Makes the backwards of torch.library.custom_op's, which export keeps.
_KEPT_BY_EXPORT: Final = "torch._library"
_TORCH: Final = str(Path(torch.__file__).parent)
#: Share of its norm by which two gradients of one forward may differ.
_ROUNDING: Final = 1e-3


def effect_of(model: nn.Module, run: Callable[[], object], weightless: Callable[[Tensor], Tensor]) -> str | None:
    """Run the model's forward twice by `run`, weightless, and return what its graph would not do; None for nothing.

    One line with the user's file and line: a `torch.autograd.Function` whose backward is not the derivative of its
    forward, a hook on a gradient, Python state that the second forward changes too, random numbers that are not
    torch's. A mask that the first forward makes is no such state. Nor is a tensor that each forward replaces unread.
    `weightless` returns a tensor's weightless copy.
    """
    effects: list[str] = []
    run()
    before, generators = leaves_of(model, weightless), _generators()
    with _observing(effects) as read:
        run()
    if effects:
        return effects[0]
    after = leaves_of(model, weightless)
    for name, leaves in before.items():
        if any(_changed(old, new, read) for old, new in zip(leaves, after.get(name, ()), strict=False)):
            return f"{_place_of(model, name)}: {name} {_STATE}"
    return None if generators == _generators() else f"{_source_of(type(model))}: {_RANDOM}"


def _changed(before: Leaf, after: Leaf, read: Collection[int]) -> bool:
    """Return whether a forward changes this state: a tensor in place, or to another one after it has `read` it."""
    if before.tensor is None or after.tensor is None:
        return before.words != after.words
    return before.versions != after.versions if before.tensor is after.tensor else id(before.tensor) in read


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Reads(TorchFunctionMode):
    """Inside, `tensors` are the identities of the tensors that torch's functions take."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "__get__" or isinstance(returned, Tensor):  # its shape is not its value
            self.tensors.update(map(id, _tensors((args, kwargs))))
        return returned


@contextlib.contextmanager
def _observing(effects: list[str]) -> Iterator[set[int]]:
    """Inside, messages on Functions and hooks are appended to `effects`; yield the identities of tensors read."""
    apply, register = Function.__dict__["apply"], Tensor.__dict__["register_hook"]
    reads = _Reads()

    def observed_apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        tensors = [argument for argument in args if isinstance(argument, Tensor)]
        reads.tensors.update(map(id, tensors))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            kept = cls.__module__.startswith(_KEPT_BY_EXPORT)
            if issubclass(cls, BackwardHookFunction):
                effects.append(f"{_caller()}: {_HOOK}")
            elif not kept and not _derives(cls, apply.__get__(None, cls), args, kwargs):
                what = _REENTRANT if issubclass(cls, CheckpointFunction) else f"{cls.__name__} {_OWN_GRADIENT}"
                effects.append(f"{_caller()}: {what}")
        return apply.__get__(None, cls)(*args, **kwargs)

    def observed_register(tensor: Tensor, hook: Any) -> Any:
        effects.append(f"{_caller()}: {_HOOK}")
        return register(tensor, hook)

    Function.apply = classmethod(observed_apply)  # type: ignore[assignment, method-assign]
    Tensor.register_hook = observed_register  # type: ignore[method-assign]
    try:
        with reads:
            yield reads.tensors
    finally:
        Function.apply = apply  # type: ignore[method-assign]
        Tensor.register_hook = register  # type: ignore[method-assign]


def _derives(
    function: type[Function], apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return whether its backward is what autograd makes of its forward, by random numbers of the shapes of `args`."""

    def inlined(*given: Any) -> Any:
        if function.setup_context is not Function.setup_context:
            return function.forward(*given, **kwargs)
        needs = tuple(isinstance(argument, Tensor) and argument.requires_grad for argument in given)
        return function.forward(_Context(needs), *given, **kwargs)

    try:
        with unset_fake_temporarily(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            given = tree_map_only(Tensor, _random_like, args)
            own = _gradients(lambda *given: apply(*given, **kwargs), given)
            return all(map(_alike, own, _gradients(inlined, given)))
    except Exception:  # a function that runs with other numbers only is not known to be right
        return False


def _alike(gradient: Tensor | None, other: Tensor | None) -> bool:
    if gradient is None or other is None:
        return gradient is other
    return bool((gradient - other).norm() <= _ROUNDING * other.norm())


def _random_like(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        values = torch.randn(tensor.shape, dtype=torch.float64).to(tensor.dtype)
        return values.requires_grad_(tensor.requires_grad)
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def _gradients(call: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor | None]:
    leaves = [argument for argument in args if isinstance(argument, Tensor) and argument.requires_grad]
    given = [argument.clone() if isinstance(argument, Tensor) else argument for argument in args]  # may change in place
    outputs = [tensor for tensor in _tensors(call(*given)) if tensor.requires_grad]
    torch.manual_seed(1)
    return list(torch.autograd.grad(outputs, leaves, [torch.randn_like(out) for out in outputs], allow_unused=True))


class _Context:
    """Stands in for the `ctx` of a forward whose backward is not called."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _generators() -> str:
    return repr((random.getstate(), [list(map(str, np.ravel(part))) for part in np.random.get_state()]))


def _caller() -> str:
    """Return `FILE:LINE: \\`code\\`` of the innermost call outside torch and this file."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((_TORCH, "<")) and frame.filename != __file__:
            return f"{frame.filename}:{frame.lineno}: `{frame.line}`"
    raise AssertionError("the model's own forward calls it")


def _place_of(model: nn.Module, name: str) -> str:
    """Return where state is changed, as far as the source of the functions that the model reaches tells."""
    trees = []
    for function in functions_of(model):
        if function.__name__ != "__init__" and not (function.__module__ or "").startswith("torch."):
            with contextlib.suppress(OSError, TypeError, SyntaxError):
                lines, start = inspect.getsourcelines(function.__code__)
                trees.append((function.__code__.co_filename, start, ast.parse(textwrap.dedent("".join(lines)))))
    for part in reversed(re.findall(r"[A-Za-z_]\w*", re.sub(r"\[.*?\]", "", name))):
        for file, start, tree in trees:
            for node in ast.walk(tree):
                if _changes(node, part):
                    line = start + node.lineno - 1  # type: ignore[attr-defined]
                    return f"{file}:{line}: `{linecache.getline(file, line).strip()}`"
    return _source_of(type(model))


def _changes(node: ast.AST, name: str) -> bool:
    """Return whether it assigns to what is so named, to an entry or an attribute of it, or calls a method of it."""
    match node:
        case ast.Assign(targets=targets):
            pass
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            targets = [target]
        case ast.Call(func=ast.Attribute(value=owner)):
            targets = [owner]
        case _:
            return False
    inside = (inner for target in targets for inner in ast.walk(target))
    return any(name in (getattr(inner, "attr", None), getattr(inner, "id", None)) for inner in inside)


def _source_of(kind: type) -> str:
    try:
        return f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        return kind.__module__
