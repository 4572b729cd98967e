"""Autograd's rule for streams: a node's backward runs on the stream of its forward, and edges between streams order.

Where a gradient goes from a node of one stream to a node of another, the second stream waits for the first, and is
recorded on the gradient (torch/csrc/autograd/input_buffer.cpp). A leaf's is added up by a node of the stream that first
used the leaf. At its end whoever called the backward waits for these streams, and for no others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tests.rig.clocks import Stream
from tests.rig.races import Memory

__all__ = ["BackwardStreams"]

_STREAM = "stream of the forward"
_LEAF = "AccumulateGrad"


class BackwardStreams(TorchFunctionMode):
    """Notes the stream of every node that operations make, and has its backward run there."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self._patch = pytest.MonkeyPatch()
        self._leaves = set[Stream]()  # of the backward that is under way

    def __enter__(self) -> BackwardStreams:
        apply: Any = torch.autograd.Function.apply.__func__

        def applied(function: Any, *args: Any, **kwargs: Any) -> Any:
            result = apply(function, *args, **kwargs)
            self._note(result)
            return result

        engine: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def backward(*args: Any, **kwargs: Any) -> Any:
            device, outer, self._leaves = self._memory.device, self._leaves, set()
            caller, device.current = device.current, device.default
            try:
                return engine(*args, **kwargs)
            finally:
                for leaf in self._leaves:
                    caller.wait_stream(leaf)
                device.current, self._leaves = caller, outer

        self._patch.setattr(torch.autograd.Function, "apply", classmethod(applied))
        self._patch.setattr(torch.autograd, "_engine_run_backward", backward)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        self._patch.undo()
        super().__exit__(*error)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._note(result)
        return result

    def _note(self, result: Any) -> None:
        device = self._memory.device
        nodes = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if _STREAM in node.metadata:
                continue
            stream = node.metadata[_STREAM] = self._stream_of(node)
            after = [one for one, _ in node.next_functions if one is not None]
            nodes += after
            others = {self._stream_of(one) for one in after} - {stream}
            if stream is not device.default or others:
                self._follow(node, stream, others)
            if _LEAF in node.name():
                node.register_prehook(lambda gradients, stream=stream: self._leaves.add(stream))

    def _stream_of(self, node: Any) -> Stream:
        """The stream of its forward; a new one's is the current one."""
        return node.metadata.get(_STREAM, self._memory.device.current)  # type: ignore[no-any-return]

    def _follow(self, node: Any, stream: Stream, others: set[Stream]) -> None:
        device, memory = self._memory.device, self._memory

        def before(gradients: Any) -> None:
            device.current = stream

        def after(results: Any, gradients: Any) -> None:
            for other in others:
                other.wait_stream(stream)
                for result in results:
                    if isinstance(result, Tensor):
                        memory.record(result, other)
            device.current = device.default

        node.register_prehook(before)
        node.register_hook(after)
