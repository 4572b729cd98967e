"""What is read from source is what an import would show, and what cannot be read is refused in one line."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenpipe.upstream import BUILTIN, UpstreamError, signature_of
from evenpipe.upstream.source import literal_in, signature_in
from evenpipe.upstream.symbols import locate

PACKAGE = {
    "__init__.py": "from .inner import step as renamed\nfrom still_engine.inner.steps import Engine\n",
    "inner/__init__.py": "from .steps import step\nfrom . import steps\n",
    "inner/steps.py": """
import contextlib
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Optional

from ..constants import NAME

if TYPE_CHECKING:
    from nowhere import typed

try:
    from nowhere_installed import fused
except ImportError:
    def fused(x, eps=1e-05):
        return x

def step(batch: int, /, rate: "float" = 0.1, *more: int, name=NAME, shape=(1, -2), **others: Optional[str]) -> str: ...

def step_again(first): ...
def step_again(second): ...

alias = step

def typed(here): ...

@contextlib.contextmanager
def paused(why, *, until={}):
    yield

class Base:
    def __init__(self, size, *, depth=2): ...
    def run(self, task='all'): ...
    @staticmethod
    def helper(left, right=None): ...
    @classmethod
    def made(cls, of): ...
    @property
    def done(self): ...
    async def wait(self, seconds=1.5): ...

class Engine(Base):
    class Part:
        def turn(self, by): ...

class Cached(Engine):
    def __new__(cls, key): ...

class Empty: ...

@dataclass
class Settings:
    count: ClassVar[int] = 0
    size: int
    names: list = field(default_factory=list)
    limit: float = field(default=1.0)
    result: int = field(init=False, default=3)

@dataclass(order=True)
class MoreSettings(Settings):
    names: tuple = ()
    last: str = "end"

@dataclass
class OwnConstructor:
    size: int
    def __init__(self, **kwargs): ...
""",
    "constants.py": "NAME = 'a name'\nVERSION = (1, 2)\nMADE = len(NAME)\n",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in PACKAGE.items():
        path = tmp_path / "still_engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "still_engine"]:
        del sys.modules[name]


STEPS = "still_engine.inner.steps"


@pytest.mark.parametrize(
    "symbol",
    [
        *("still_engine:renamed", "still_engine:Engine.run", "still_engine.inner:step"),
        *(f"{STEPS}:{name}" for name in ("step", "step_again", "alias", "typed", "fused", "paused")),
        *(f"{STEPS}:Base{rest}" for rest in ("", ".run", ".helper", ".made", ".done", ".wait")),
        *(f"{STEPS}:Engine{rest}" for rest in ("", ".run", ".Part.turn")),
        *(f"{STEPS}:{name}" for name in ("Cached", "Empty", "Settings", "MoreSettings", "OwnConstructor")),
    ],
)
def test_the_source_says_what_an_import_says(root: Path, symbol: str) -> None:
    assert signature_in(root, symbol) == signature_of(locate(symbol).value)


def test_nothing_is_imported(root: Path) -> None:
    (root / "still_engine" / "__init__.py").write_text("raise SystemExit(1)\n")
    assert signature_in(root, f"{STEPS}:Base.done") == BUILTIN
    assert "still_engine" not in sys.modules


DEFAULTS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.binary()
)


@st.composite
def parameter_lists(draw: st.DrawFn) -> str:
    """Any list of parameters that Python allows, as text."""

    def named(prefix: str, defaults: list[object], plain: int) -> list[str]:
        names = [f"{prefix}{number}: int" for number in range(plain)]
        return names + [f"{prefix}_{number}={value!r}" for number, value in enumerate(defaults)]

    few = st.integers(0, 2)
    values = st.lists(DEFAULTS | st.tuples(DEFAULTS, DEFAULTS) | st.dictionaries(st.text(), DEFAULTS), max_size=2)
    positional_only = named("p", [], draw(few))
    positional = named("a", draw(values), draw(few))
    keyword_only = named("k", draw(values), draw(few))
    star = draw(st.sampled_from(["*rest", "*"] if keyword_only else ["*rest", ""]))
    last = draw(st.sampled_from(["**others: str", ""]))
    slash = ["/"] if positional_only else []
    return ", ".join(part for part in (*positional_only, *slash, *positional, star, *keyword_only, last) if part)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parameters=parameter_lists())
def test_every_list_of_parameters_reads_like_an_import(tmp_path: Path, parameters: str) -> None:
    text = f"def step({parameters}) -> None: ..."
    (tmp_path / "one.py").write_text(text, encoding="utf-8")
    namespace: dict[str, object] = {}
    exec(text, namespace)
    assert signature_in(tmp_path, "one:step") == signature_of(namespace["step"])


REFUSED = {
    "a missing module": ("lost:step", "there is no {root}/lost.py"),
    "a missing function": ("one:leap", "leap is not in {root}/one.py"),
    "a missing method": ("one:Engine.leap", "Engine in {root}/one.py has no leap"),
    "a method of a function": ("one:step.leap", "step is not one class"),
    "an import from elsewhere": ("one:join", "join in {root}/one.py comes from os.path, which is not in {root}"),
    "a module": ("one:os", "os in {root}/one.py is no function, class or value"),
    "a made function": ("one:made", "is made by print(step) in {root}/one.py, which has to be run"),
    "a default that is computed": ("one:late", "len('ab') in {root}/one.py cannot be told without running it"),
    "a choice": ("one:either", "has one of the signatures (left) and (right), which only an import can tell"),
    "no Python": ("broken:step", "{root}/broken.py cannot be read ("),
}
ONE = """
import os
from os.path import join

def step(): ...
made = print(step)
def late(size=len('ab')): ...
class Engine: ...

if os.environ:
    def either(left): ...
else:
    def either(right): ...
"""


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_told_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    symbol, said = REFUSED[case]
    (tmp_path / "one.py").write_text(ONE)
    (tmp_path / "broken.py").write_text("def step(:\n")
    with pytest.raises(UpstreamError) as error:
        signature_in(tmp_path, symbol)
    assert str(error.value).startswith(f"{symbol}: {said.format(root=tmp_path)}")
    assert str(error.value).endswith(": use an unmodified supported release")
    assert "\n" not in str(error.value)


def test_literals(root: Path) -> None:
    assert literal_in(root, "still_engine.constants:VERSION") == (1, 2)
    assert literal_in(root, f"{STEPS}:NAME") == importlib.import_module("still_engine.constants").NAME
    for symbol in ("constants:MADE", "constants:LOST", "inner.steps:step"):
        with pytest.raises(UpstreamError, match=rf"^still_engine\.{symbol}: "):
            literal_in(root, f"still_engine.{symbol}")
