"""Builds the model that is timed for the flags given, and prints how many parameters each part of it has."""

import json
import sys

from evenpipe.megatron.cpu_mode import install_cpu_mode

install_cpu_mode()

from evenpipe.megatron.layout_model import build, read  # noqa: E402
from evenpipe.partition.layouts import work_of  # noqa: E402

args, shape, _ = read(sys.argv[1:], None)
model, parts = build(args, shape)
words = {id(model.embedding.word_embeddings.weight)}
found = {}
for kind, part in {**parts, "loss": None}.items():
    others = {id(parameter) for other in parts.values() for parameter in other.parameters()} if part is None else set()
    mine = (model if part is None else part).parameters()
    found[kind] = sum(parameter.numel() for parameter in mine if id(parameter) not in words | others)
expected = {kind: sum(node.parameters + node.expert_parameters for node in work_of(shape, kind)) for kind in found}
print(json.dumps([found, expected]))
