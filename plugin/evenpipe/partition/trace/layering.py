"""Where a model's layers end, by the nesting of its modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx, nn

__all__ = ["ends_of_layers", "module_path"]


def module_path(node: fx.Node) -> str:
    """The module whose forward makes the node, as in `bert.encoder.layer.3.output`; empty for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def ends_of_layers(model: nn.Module, order: Sequence[fx.Node], allowed: Sequence[bool]) -> tuple[int, ...]:
    """The last node of each layer, ascending: what precedes the repeated blocks, each block, and what follows them.

    A block is a member of the outermost list or sequence with two members of one class. A layer ends at the next node
    where a cut is allowed.
    """
    lists = {name for name, module in model.named_modules() if _repeats(module)}
    blocks = [_block(node, lists) for node in order]
    last = {block: number for number, block in enumerate(blocks) if block}
    if not last:
        return (len(order) - 1,)
    start = next(number for number, block in enumerate(blocks) if block)
    wanted = {start - 1, *last.values()} - {-1}
    cuts = [number for number, cut in enumerate(allowed) if cut]
    ends = {next((cut for cut in cuts if cut >= number), len(order) - 1) for number in wanted}
    return tuple(sorted(ends | {len(order) - 1}))


def _repeats(module: nn.Module) -> bool:
    classes = [type(child) for child in module.children()]
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(set(classes)) < len(classes)


def _block(node: fx.Node, lists: set[str]) -> str:
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        if path and path.rpartition(".")[0] in lists:
            return str(path)
    return ""
