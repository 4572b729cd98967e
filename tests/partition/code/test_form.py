"""A plan from a stranger: its stage files are operations on tensors, or are not executed."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from torch import nn

from evenpipe.partition.models import Example
from evenpipe.partition.trace import trace
from evenpipe.stage_code import StageCodeError, load_parts, part_types
from evenpipe.stage_code.form import check_form
from tests.partition.code.cut import plan_at, profiled, written

STAGE = '''"""Stage."""
import torch
from evenpipe.stage_code import Boundary, Part
aten = torch.ops.aten
PLAN = "0"
FILES = {{}}
{module}
class Part0(Part):
    INPUTS = {table}
    {body}
    def forward(self, inputs, draws, keep, *received):
        x = inputs["x"]
        {statement}
        return (x.contiguous(),)
PARTS = (Part0,)
'''


def stage(statement: str = "x = aten.relu.default(x)", module: str = "", table: str = '("x",)', body: str = "") -> str:
    return STAGE.format(statement=statement, module=module, table=table, body=body)


@pytest.mark.parametrize(
    "statement",
    [
        "y = aten.div.Tensor_mode(x, self.h[0].weight, rounding_mode='floor')",
        "y = keep(3, aten.add.Tensor, x, -1.5e-3, alpha=float('inf'))",
        "y = keep(3, operator.getitem, x, (0, slice(None, 2, None)))",
        "with torch.autocast(device.type, torch.bfloat16, True, None):\n            y = x[0]",
        "y = torch.ops.aten.to.dtype(self['a b'][0].w, torch.bfloat16, memory_format=torch.channels_last)",
        "y = aten.__and__.Tensor(x, x)",
        "y = (x, [x, None], 1+2j)\n        del y",
    ],
)
def test_operations_on_tensors_pass(statement: str) -> None:
    check_form(stage(statement), "P.stage0.py")


REFUSED = [
    stage(module="import os"),
    stage(module="import torch as operator"),
    stage(module="from os import system"),
    stage(module="from evenpipe.stage_code import load_parts"),
    stage(module="print(1)"),
    stage(module="aten = torch.ops.debugprims"),
    stage(module="FILES = {**FILES}"),
    stage(module="PLAN = __import__('os').system('true')"),
    stage(module="class Part1(Part, metaclass=torch):\n    pass"),
    stage(module="@torch.load\nclass Part1(Part):\n    INPUTS = ()"),
    stage(table="torch.load('x')"),
    stage(table="(torch.hub,)"),
    stage(table="[x for x in ()]"),
    stage(table="f'{1}'"),
    stage(body="__init__ = Boundary"),
    stage(body="to = 3"),
    stage(body="def __init__(self): pass"),
    stage(body="def forward(self, inputs, draws, keep, *received, x=print()): pass"),
    *map(
        stage,
        [
            "open('x')",
            "eval('x')",
            "x = x.numpy()",
            "x = x.__class__",
            "x = x.contiguous",
            "x = self.__class__.__base__",
            "x = self['__dict__']",
            "x = self.load_state_dict(x)",
            "self.x = x",
            "x[0] = 1",
            "aten = x",
            "keep = x",
            "x = __builtins__['open']",
            "x = keep(3, x, 'echo')",
            "x = keep.__class__(3)",
            "x = keep(3, torch.load, 'x')",
            "x = keep(3, open, 'x')",
            "x = aten.add.Tensor(x, open('x'))",
            "x = aten.add.Tensor(x, *received)",
            "x = aten.add.Tensor(x, **inputs)",
            "x = aten.add.Tensor(x, (y := 1))",
            "x = aten.from_file.default('/etc/passwd', True, 8)",
            "aten._print.default('x')",
            "x = aten.save.default(x, 'x')",
            "x = aten.add.__class__(x)",
            "x = torch.ops.load_library('x.so')",
            "x = torch.ops.load_library.a.b('x.so')",
            "x = torch.ops.debugprims.load_tensor.default('x', [1], [1], dtype=torch.float32, device=device)",
            "x = torch.ops.aten.__getattr__('x')",
            "x = lambda: 0",
            "import os",
            "global x",
            "while True: x = x[0]",
            "with open('x'): x = x[0]",
            "with draws(0) as x: x = x[0]",
            "with torch.autocast(x.type): x = x[0]",
            "device = inputs['x']",
            "x: int = 0",
            "x = x if x else x",
            "x = await_ @ x",
            "return (open('x').contiguous(),)",
            "x = x[0]  # \x1b]0;title\x07",
            "x = x[0]  # \u202egnp",
            "x = 'a\0b'",
            "x = (",
            "x = " + "(" * 500 + "0" + ",)" * 500,
        ],
    ),
]


def refusal_of(source: str) -> str:
    try:
        check_form(source, "P.stage0.py")
    except StageCodeError as refusal:
        return str(refusal)
    return "accepted"


def test_anything_else_is_refused_in_one_line() -> None:
    said = [(source, refusal_of(source)) for source in REFUSED]
    assert [one for one in said if not (one[1].startswith("P.stage0.py") and one[1].isprintable())] == []


@pytest.fixture(scope="module")
def doubled() -> str:
    one, two = "(Tensor x) -> Tensor", "(Tensor x, str y) -> Tensor"
    torch.library.custom_op("evenpipe_form::doubled", lambda x: x * 2, mutates_args=(), schema=one)
    torch.library.custom_op("evenpipe_form::named", lambda x, y: x + 1, mutates_args=(), schema=two)
    return "torch.ops.evenpipe_form"


def test_the_process_own_operators_pass_if_they_take_no_text(doubled: str) -> None:
    check_form(stage(f"x = {doubled}.doubled.default(x)"), "P.stage0.py")
    with pytest.raises(StageCodeError, match="is no operation on tensors"):
        check_form(stage(f"x = {doubled}.named.default(x, 'y')"), "P.stage0.py")


def test_digests_that_a_stranger_made_execute_nothing(tmp_path) -> None:
    """They only show that a file has not changed since."""
    example = Example("model", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Sum()), {"input": torch.ones(2, 4)})
    graph = trace(example.model, example.inputs)
    found, path = profiled(example, graph), tmp_path / "P.json"
    written(example, graph, plan_at(found, 2, [0]), found, path)
    code, owned = tmp_path / "P.stage1.py", tmp_path / "owned"
    code.write_text(code.read_text() + f"\nopen({str(owned)!r}, 'w')\n")
    document = json.loads(path.read_text())
    document["code"][code.name] = hashlib.sha256(code.read_bytes()).hexdigest()
    path.write_text(json.dumps(document))
    for refused in (lambda: load_parts(path, 1, example.model), lambda: part_types(path, 1)):
        with pytest.raises(StageCodeError, match=r"P\.stage1\.py:\d+: `open\(.*is no operation on tensors, and is not"):
            refused()
    assert not owned.exists()
    load_parts(path, 1, example.model, trust=True)
    assert owned.exists()


class Sum(nn.Module):
    def forward(self, x):
        return x.sum()


def test_a_models_name_does_not_end_the_docstring(tmp_path) -> None:
    example = Example('m"""\nimport os', nn.Sequential(nn.Linear(4, 4), Sum()), {"input": torch.ones(2, 4)})
    graph = trace(example.model, example.inputs)
    found, path = profiled(example, graph), tmp_path / "P.json"
    written(example, graph, plan_at(found, 1, []), found, path)
