"""Builds the model that is timed for the flags given, and prints how many parameters each part of it has."""

import json
import sys

from evenpipe.megatron_lm.cpu_scripts import install_cpu_mode

install_cpu_mode()

from evenpipe.megatron_lm.layout_model import build, read  # noqa: E402
from evenpipe.planner.arguments import Pipelined, model_of, run_of  # noqa: E402
from evenpipe.planner.operations.operation import total  # noqa: E402
from evenpipe.planner.operations.parts import Blocks  # noqa: E402

args, shape, _ = read(sys.argv[1:], None)
model, parts = build(args, shape)
words = {id(model.embedding.word_embeddings.weight)}
found = {}
for kind, part in {**parts, "loss": None}.items():
    others = {id(parameter) for other in parts.values() for parameter in other.parameters()} if part is None else set()
    mine = (model if part is None else part).parameters()
    found[kind] = sum(parameter.numel() for parameter in mine if id(parameter) not in words | others)
described = model_of(args, "the flags")
operations = Blocks(described, run_of(args, Pipelined())).operations
blocks = {"embedding": "embedding", "dense": "layer", "experts": "expert layer", "mtp": "further token", "loss": "head"}
expected = {kind: total(operations[blocks[kind]]).all for kind in found}
expected["embedding"] -= model.embedding.word_embeddings.weight.numel()
expected["mtp"] = expected.get("mtp", 0) * described.mtp_layers
expected["loss"] -= model.embedding.word_embeddings.weight.numel() * described.tied
print(json.dumps([found, {kind: expected[kind] for kind in found}]))
