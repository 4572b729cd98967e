"""One operation of a micro-batch's forward: which storages it allocates, and how it is run again in the backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from evenpipe.runtime.precisions import autocast_dtype, autocasting
from evenpipe.runtime.saved import SavedStorage, plain_parts, storages_of, unpacked

__all__ = ["NodeCall", "Pack", "RerunError", "call_noting"]

#: A hook of autograd's: what it shall hold in place of a tensor that it saves.
Pack = Callable[[Tensor], object]


def call_noting(
    call: Callable[[], Any], given: Any, note: Callable[[Tensor], None], pack: Pack, unpack: Callable[[Any], Tensor]
) -> Any:
    """Return what `call()` returns; `note` gets a tensor in each storage that it allocates, once.

    First those that autograd saves, in that order, then those that are returned: the order of a profile's storages.
    `given`: what it takes, in whatever nesting, of which the storages are known.
    """
    known = {part.untyped_storage()._cdata for leaf in tree_leaves(given) for part in plain_parts(leaf)}
    observers = [note]

    def see(value: Any) -> None:
        for part in plain_parts(value):
            if (address := part.untyped_storage()._cdata) not in known:
                known.add(address)
                observers[0](part)

    def packed(tensor: Tensor) -> object:
        see(tensor)
        return pack(tensor)

    with saved_tensors_hooks(packed, unpack):
        result = call()
    for leaf in tree_leaves(result):
        see(leaf)
    observers.clear()  # autograd holds the hook for as long as what it has saved
    return result


class _Taken(NamedTuple):
    """An argument: as it is, or how it is had again. `written`: the operation changes it, which it shall not again."""

    held: object
    requires_grad: bool
    written: bool

    def again(self) -> Tensor:
        tensor = unpacked(self.held)
        return tensor.detach().clone() if self.written else tensor.detach().requires_grad_(self.requires_grad)


class RerunError(RuntimeError):
    """The operation of `node` failed when it ran again; what it raised is the cause."""

    def __init__(self, node: int, error: Exception) -> None:
        super().__init__(f"node {node}, which runs again: {error}")
        self.node = node


class NodeCall:
    """A node's operation and its arguments, until it has run again: `made` are storages that it then fills anew.

    It holds its arguments by `hold`, as autograd would hold them; `scope` makes it draw the numbers that it has drawn.
    """

    __slots__ = ("_args", "_autocast", "_has_run", "_kwargs", "_node", "_op", "_scope", "made")

    def __init__(
        self,
        node: int,
        op: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        hold: Pack,
        scope: Callable[[], AbstractContextManager[object]],
    ) -> None:
        written = _written(op)

        def taken(value: Any, name: int | str) -> Any:
            def held(leaf: Any) -> Any:
                return _Taken(hold(leaf), leaf.requires_grad, name in written) if isinstance(leaf, Tensor) else leaf

            return tree_map(held, value)

        self._node, self._op = node, op
        self._args = [taken(value, number) for number, value in enumerate(args)]
        self._kwargs = {name: taken(value, name) for name, value in kwargs.items()}
        self._scope = scope
        types = (leaf.device.type for leaf in tree_leaves((list(args), kwargs)) if isinstance(leaf, Tensor))
        device_type = next(types, "cpu")
        self._autocast = device_type, autocast_dtype(device_type)  # a thread of autograd's has its own
        self._has_run = False
        #: By their number among those that it allocates. They own it, so that what nobody needs any more dies.
        self.made: dict[int, weakref.ref[SavedStorage]] = {}

    def run(self) -> None:
        """Fill what it has made with what it makes now, the same numbers; let go of what it takes.

        Calls that it takes something from and that have not run again come first; a long chain of them takes no stack.
        """
        due = [self]
        while due:
            before = due[-1]._awaited()
            due += before
            if not before:
                due.pop()._run()

    def _awaited(self) -> list[NodeCall]:
        """Return the calls that have to run before it does."""
        arguments = [leaf for leaf in tree_leaves((self._args, self._kwargs), is_leaf=_is_taken) if _is_taken(leaf)]
        calls = (saved.awaits() for leaf in arguments for saved in storages_of(leaf.held))
        return [call for call in calls if call is not None]

    def _run(self) -> None:
        if self._has_run:
            return
        self._has_run = True
        fresh = list[torch.UntypedStorage]()

        def note(tensor: Tensor) -> None:
            fresh.append(tensor.untyped_storage())

        # With gradients, for only then autograd saves, and so shows, what the operation keeps for itself.
        try:
            args, kwargs = tree_map(_again, (self._args, self._kwargs), is_leaf=_is_taken)
            with torch.enable_grad(), autocasting(*self._autocast), self._scope():
                call_noting(lambda: self._op(*args, **kwargs), (args, kwargs), note, _nothing, _never)
        except Exception as error:
            raise RerunError(self._node, error) from error
        self._args, self._kwargs = [], {}
        for number, reference in self.made.items():
            if (saved := reference()) is not None and saved.storage is None:
                saved.own(fresh[number])


def _is_taken(value: Any) -> bool:
    return isinstance(value, _Taken)


def _again(value: Any) -> Any:
    return value.again() if isinstance(value, _Taken) else value


def _written(op: Callable[..., Any]) -> set[int | str]:
    """Return the arguments that an operation changes, by place and by name; schemas of batch norms do not say so."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return set()
    written = [
        (number, argument.name)
        for number, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name.startswith("running_")
    ]
    return {key for keys in written for key in keys}


def _nothing(tensor: Tensor) -> object:
    return None


def _never(packed: Any) -> Tensor:
    raise RuntimeError("an operation that ran again has no backward of its own")
