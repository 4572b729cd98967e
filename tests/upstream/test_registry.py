"""A patch is applied only where it is known to fit, together with all of its set, and can be taken back."""

import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from evenpipe.upstream import ANY, APPLIED, BUILTIN, FITS, Distribution, Expectation, Patch, PatchSet, UpstreamError

ENGINE = Distribution("old-engine", version_at="old_engine:__version__")
STEP = {"1.2": "(batch, rate=0.1, *, verbose=False)"}

MODULES = {
    "old_engine/__init__.py": "__version__ = '1.2.3'\n",
    "old_engine/core.py": """
import contextlib

def step(batch: int, rate: "float" = 0.1, *, verbose: bool = False) -> str:
    return "step"

def stop():
    return "stop"

@contextlib.contextmanager
def paused(why):
    yield why

class Base:
    def run(self):
        return "run"

class Engine(Base):
    pass
""",
    "old_engine/loop.py": """
from old_engine.core import step

def one_iteration():
    return step(0)
""",
    "old_engine-1.2.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: old-engine\nVersion: 1.2.3\n",
}


class OldEngine:
    """The modules of a package that the tests write to disk and import."""

    def __init__(self) -> None:
        self.root = importlib.import_module("old_engine")
        self.core = importlib.import_module("old_engine.core")
        self.loop = importlib.import_module("old_engine.loop")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OldEngine]:
    for name, text in MODULES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield OldEngine()
    for name in [name for name in sys.modules if name.partition(".")[0] == "old_engine"]:
        del sys.modules[name]


def replaced(original: Callable[..., str]) -> Callable[..., str]:
    return lambda *args, **kwargs: f"replaced {original(*args, **kwargs)}"


def patch(
    *targets: str, signature: str = STEP["1.2"], replacement: Callable[[Any], Any] = replaced, series: str = "1.2"
) -> Patch:
    return Patch(targets[0].partition(":")[2], targets, ENGINE, {series: signature}, replacement, "for the test")


STEP_EVERYWHERE = ("old_engine.core:step", "old_engine.loop:step")


def test_apply_replaces_the_definition_and_the_names_that_other_modules_imported(engine: OldEngine) -> None:
    PatchSet("test", [patch(*STEP_EVERYWHERE)]).apply()
    assert engine.core.step(0) == "replaced step"
    assert engine.loop.one_iteration() == "replaced step"


def test_revert_restores_the_very_same_objects(engine: OldEngine) -> None:
    before = engine.core.step
    patches = PatchSet("test", [patch(*STEP_EVERYWHERE)])
    patches.apply()
    patches.revert()
    assert engine.core.step is before
    assert engine.loop.step is before
    patches.apply()
    assert engine.loop.one_iteration() == "replaced step"


def test_an_inherited_method_is_inherited_again_after_revert(engine: OldEngine) -> None:
    patches = PatchSet("test", [patch("old_engine.core:Engine.run", signature="(self)")])
    patches.apply()
    assert engine.core.Engine().run() == "replaced run"
    assert engine.core.Base().run() == "run"
    patches.revert()
    assert "run" not in vars(engine.core.Engine)


def test_check_changes_nothing_and_gives_one_state_for_each_patch(engine: OldEngine) -> None:
    fitting, changed = patch(*STEP_EVERYWHERE), patch("old_engine.core:stop", signature="(gently)")
    patches = PatchSet("test", [fitting, changed])
    before = engine.core.step
    states = patches.check()
    assert [state.patch for state in states] == [fitting, changed] == list(patches.list())
    assert states[0].state == FITS
    assert "old_engine.core:stop" in states[1].state
    assert engine.core.step is before


def test_an_applied_set_says_so_and_applying_it_again_changes_nothing(engine: OldEngine) -> None:
    patches = PatchSet("test", [patch(*STEP_EVERYWHERE)])
    patches.apply()
    patches.apply()
    assert patches.applied
    assert [state.state for state in patches.check()] == [APPLIED]
    assert engine.core.step(0) == "replaced step"


def test_what_another_instance_of_a_set_applied_is_applied(engine: OldEngine) -> None:
    PatchSet("test", [patch(*STEP_EVERYWHERE)]).apply()
    same, other = (PatchSet(name, [patch(*STEP_EVERYWHERE)]) for name in ("test", "other"))
    assert [state.state for state in same.check()] == [APPLIED]
    assert "already replaced by test/step" in other.check()[0].state


REFUSALS = {
    "an unknown release": (
        patch("old_engine.core:step", series="1.1"),
        "old-engine 1.2.3: unknown release, expected one of 1.1: install one of these",
    ),
    "a changed signature": (
        patch("old_engine.core:step", signature="(batch)"),
        "old_engine.core:step: old-engine 1.2.3 has signature (batch, rate=0.1, *, verbose=False), expected (batch): "
        "use an unmodified supported release, or remove the patch that changed it",
    ),
    "a missing symbol": (
        patch("old_engine.core:leap"),
        "old_engine.core:leap: not found (module 'old_engine.core' has no attribute 'leap'): "
        "install a supported release",
    ),
    "a missing module": (
        patch("old_engine.turbo:step"),
        "old_engine.turbo:step: cannot import old_engine.turbo (No module named 'old_engine.turbo'): "
        "install a supported release",
    ),
    "a missing re-binding": (
        patch("old_engine.core:step", "old_engine.loop:leap"),
        "old_engine.loop:leap: not found (module 'old_engine.loop' has no attribute 'leap'): "
        "install a supported release",
    ),
    "a re-binding of something else": (
        patch("old_engine.core:step", "old_engine.loop:one_iteration"),
        "old_engine.loop:one_iteration: bound to code in old_engine.loop, "
        "expected what old_engine.core:step is bound to: remove the other patch",
    ),
}


@pytest.mark.parametrize("refused", REFUSALS)
def test_what_does_not_fit_is_refused_in_one_line_and_nothing_is_replaced(engine: OldEngine, refused: str) -> None:
    unfit, message = REFUSALS[refused]
    before = engine.core.stop
    patches = PatchSet("test", [patch("old_engine.core:stop", signature="()"), unfit])
    with pytest.raises(UpstreamError) as error:
        patches.apply()
    assert str(error.value) == message
    assert patches.check()[1].state == message
    assert engine.core.stop is before
    assert not patches.applied


def test_a_series_is_made_of_whole_numbers(engine: OldEngine) -> None:
    """1.20 is not a release of the series 1.2."""
    engine.root.__version__ = "1.20.0"
    with pytest.raises(UpstreamError, match=r"old-engine 1\.20\.0: unknown release, expected one of 1\.2:"):
        PatchSet("test", [patch("old_engine.core:step")]).apply()


def test_the_imported_code_states_the_version_not_the_installed_metadata(engine: OldEngine) -> None:
    """A source checkout on the path shadows an installed package, whose metadata stays as it was."""
    engine.root.__version__ = "1.3.0 "
    assert ENGINE.version() == "1.3.0"
    assert Distribution("old-engine").version() == "1.2.3"


def test_an_absent_distribution_is_refused() -> None:
    with pytest.raises(UpstreamError, match=r"^no-such-engine is not installed"):
        Distribution("no-such-engine").version()
    with pytest.raises(UpstreamError, match=r"^no-such-engine is not installed"):
        Distribution("no-such-engine", version_at="no_such_engine:__version__").version()


def test_a_second_replacement_is_refused_and_names_the_first(engine: OldEngine) -> None:
    PatchSet("first", [patch(*STEP_EVERYWHERE)]).apply()
    second = PatchSet("second", [patch(*STEP_EVERYWHERE)])
    with pytest.raises(UpstreamError, match=r"^old_engine\.core:step: already replaced by first/step: revert"):
        second.apply()
    assert engine.core.step(0) == "replaced step"


def test_a_replacement_by_somebody_else_is_refused_even_when_it_looks_like_the_original(engine: OldEngine) -> None:
    @functools.wraps(engine.core.step)
    def foreign(*args: object, **kwargs: object) -> str:
        return "foreign"

    engine.core.step = engine.loop.step = foreign
    with pytest.raises(UpstreamError, match=rf"already replaced by code in {__name__}, expected old_engine\.core"):
        PatchSet("test", [patch(*STEP_EVERYWHERE)]).apply()


def test_a_rebinding_replaced_by_somebody_else_is_refused(engine: OldEngine) -> None:
    engine.loop.step = lambda batch, rate=0.1, *, verbose=False: "foreign"
    with pytest.raises(UpstreamError, match=rf"^old_engine\.loop:step: bound to code in {__name__}"):
        PatchSet("test", [patch(*STEP_EVERYWHERE)]).apply()


def test_a_context_manager_counts_as_code_of_its_own_module(engine: OldEngine) -> None:
    """Its code is in contextlib, which must not be taken for somebody's replacement."""
    assert PatchSet("test", [patch("old_engine.core:paused", signature="(why)")]).check()[0].state == FITS


def test_a_function_that_torch_does_not_compile_counts_as_code_of_its_own_module(engine: OldEngine) -> None:
    engine.core.stop = torch._disable_dynamo(engine.core.stop)
    assert PatchSet("test", [patch("old_engine.core:stop", signature="()")]).check()[0].state == FITS


def test_a_function_in_c_is_told_from_one_in_python() -> None:
    """`math.sqrt` has no signature to compare, but a Python function in its place has one."""
    python = Distribution("pytest")
    root = Patch("sqrt", ("math:sqrt",), python, {ANY: BUILTIN}, lambda original: lambda x: original(x), "for the test")
    first, second = PatchSet("first", [root]), PatchSet("second", [root])
    assert second.check()[0].state == FITS
    original, math.sqrt = math.sqrt, lambda x: x
    try:
        assert "expected builtin" in second.check()[0].state
    finally:
        math.sqrt = original
    first.apply()
    first.revert()
    assert math.sqrt is original


def test_a_failure_halfway_puts_back_what_was_already_replaced(engine: OldEngine) -> None:
    class Sealed(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            raise TypeError("sealed")

    before = engine.core.step
    patches = PatchSet("test", [patch(*STEP_EVERYWHERE)])
    engine.loop.__class__ = Sealed
    with pytest.raises(TypeError, match="sealed"):
        patches.apply()
    assert engine.core.step is before
    assert not patches.applied


def test_a_replacement_that_cannot_be_made_leaves_everything_as_it_was(engine: OldEngine) -> None:
    def broken(original: object) -> object:
        raise LookupError("nothing to put there")

    before = engine.core.step
    patches = PatchSet(
        "test", [patch(*STEP_EVERYWHERE), patch("old_engine.core:stop", signature="()", replacement=broken)]
    )
    with pytest.raises(LookupError):
        patches.apply()
    assert engine.core.step is before


def test_revert_refuses_to_undo_a_patch_that_somebody_put_on_top(engine: OldEngine) -> None:
    patches = PatchSet("test", [patch(*STEP_EVERYWHERE), patch("old_engine.core:stop", signature="()")])
    patches.apply()
    engine.core.step = lambda *args: "on top"
    with pytest.raises(UpstreamError, match=rf"^old_engine\.core:step: replaced again after test .* {__name__}"):
        patches.revert()
    assert engine.core.stop() == "replaced stop"


def test_two_patches_of_one_symbol_make_no_set() -> None:
    with pytest.raises(ValueError, match=r"test: old_engine\.core:step is the target of two patches"):
        PatchSet("test", [patch(*STEP_EVERYWHERE), patch("old_engine.core:step")])


def test_a_guard_keeps_a_whole_set_out_of_a_process(engine: OldEngine) -> None:
    patches = PatchSet("test", [patch("old_engine.core:step")], guard=lambda: "not on this machine")
    assert [state.state for state in patches.check()] == ["test: not on this machine"]
    with pytest.raises(UpstreamError, match=r"^test: not on this machine$"):
        patches.apply()
    assert engine.core.step(0) == "step"


def test_a_set_is_refused_when_a_symbol_that_it_calls_has_changed(engine: OldEngine) -> None:
    expectation = Expectation("old_engine.core:stop", ENGINE, {"1.2": "(gently)"})
    patches = PatchSet("test", [patch("old_engine.core:step")], expectations=[expectation])
    with pytest.raises(UpstreamError, match=r"^old_engine\.core:stop: .* has signature \(\), expected \(gently\)"):
        patches.apply()
    assert engine.core.step(0) == "step"


def test_an_expectation_still_holds_for_a_symbol_that_a_set_has_replaced(engine: OldEngine) -> None:
    PatchSet("test", [patch(*STEP_EVERYWHERE)]).apply()
    Expectation("old_engine.core:step", ENGINE, STEP).verify()


def test_names_imported_earlier_are_bound_again_where_that_is_asked_for(engine: OldEngine) -> None:
    """A script's `from old_engine.core import step` would otherwise go on with the original, unnoticed."""
    script = ModuleType("a_script")
    script.go = engine.core.step  # type: ignore[attr-defined]
    sys.modules["a_script"] = script
    try:
        for rebinds in (False, True):
            original = engine.core.step
            patch = Patch(
                "step",
                ("old_engine.core:step",),
                ENGINE,
                STEP,
                lambda original: lambda *a, **k: "ours",
                "test",
                rebinds,
            )
            patches = PatchSet("test", [patch])
            patches.apply()
            names = (script.go, engine.loop.step)  # type: ignore[attr-defined]
            assert all((name is original) is not rebinds for name in names)
            patches.revert()
            assert script.go is engine.loop.step is original  # type: ignore[attr-defined]
    finally:
        del sys.modules["a_script"]
