"""The page of the code names what is there: files, definitions in them, and the rooms in the order of imports."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = ROOT / "plugin" / "evenpipe"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
LAYERS = re.search(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)


def definitions(body: list[ast.stmt], owner: str = "") -> set[str]:
    found = set()
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(owner + node.name)
        if isinstance(node, ast.ClassDef):
            found |= definitions(node.body, f"{node.name}.")
    return found


def test_what_the_page_names_is_defined_there() -> None:
    named = re.findall(r"`([\w/]+\.py)(?:::([\w.]+))?`", PAGE)
    assert len(named) > 50
    for name, definition in named:
        path = (ROOT if name.startswith("tests/") else CODE) / name
        assert path.is_file(), name
        if definition:
            assert definition in definitions(ast.parse(path.read_text()).body), f"{name}::{definition}"


def test_every_room_is_named_in_the_order_of_imports() -> None:
    assert LAYERS is not None
    layers = [set(re.findall(r"\((\w+)\)", line)) for line in LAYERS[1].strip().splitlines()]
    table = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE.partition("## The life")[0], re.M)
    rows = [set(re.findall(r"`(\w+)`", row)) for row in table]
    assert rows == [layer for layer in layers if layer != {"__main__"}]
    assert set().union(*rows) == {path.parent.name for path in CODE.glob("*/__init__.py")}
