"""Actions run right after a module was executed, before its importer goes on."""

import importlib
import importlib.util
import inspect
import sys

import pytest

from evenpipe.upstream.imports import when_imported


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `early` on the import path whose module `user` takes a name out of module `maker`."""
    folder = tmp_path / "early"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "maker.py").write_text("def made():\n    return 'theirs'\n")
    (folder / "user.py").write_text("from early.maker import made\nfound = made()\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield folder
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "early"]:
        del sys.modules[name]


def replace_made():
    sys.modules["early.maker"].made = lambda: "ours"


def test_what_an_action_replaces_is_what_importers_get(package):
    when_imported("early.maker", replace_made)
    assert "early.maker" not in sys.modules
    assert importlib.import_module("early.user").found == "ours"


def test_an_action_runs_at_once_where_the_module_is_there(package):
    importlib.import_module("early.maker")
    when_imported("early.maker", replace_made)
    assert sys.modules["early.maker"].made() == "ours"


def test_actions_of_a_module_run_once_and_in_order(package):
    ran = []
    for number in range(3):
        when_imported("early.maker", lambda number=number: ran.append(number))
    importlib.import_module("early.user")
    importlib.reload(sys.modules["early.maker"])
    assert ran == [0, 1, 2]


def test_the_module_keeps_its_own_loader_and_source(package):
    when_imported("early.maker", replace_made)
    maker = importlib.import_module("early.maker")
    assert maker.__loader__ is maker.__spec__.loader
    assert type(maker.__loader__).__module__ == "_frozen_importlib_external"
    assert "theirs" in inspect.getsource(maker)


def test_an_error_of_an_action_comes_out_of_the_import(package):
    def refuse():
        raise RuntimeError("not this release")

    when_imported("early.maker", refuse)
    with pytest.raises(RuntimeError, match="not this release"):
        importlib.import_module("early.user")


def test_to_be_found_is_not_to_be_imported(package):
    when_imported("early.maker", replace_made)
    assert importlib.util.find_spec("early.maker") is not None
    assert importlib.import_module("early.user").found == "ours"


def test_an_import_that_failed_can_be_tried_again(package):
    maker = package / "maker.py"
    text = maker.read_text()
    maker.write_text(text + "raise RuntimeError('not yet')\n")
    when_imported("early.maker", replace_made)
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module("early.user")
    maker.write_text(text)
    importlib.invalidate_caches()
    assert importlib.import_module("early.user").found == "ours"


def test_an_action_may_add_another_for_the_same_module(package):
    when_imported("early.maker", lambda: when_imported("early.maker", replace_made))
    assert importlib.import_module("early.user").found == "ours"


def test_too_late_is_told(package):
    (package / "maker.py").write_text(
        "from evenpipe.upstream.imports import when_imported\nwhen_imported('early.maker', print)\n"
    )
    with pytest.raises(ImportError, match=r"early\.maker is being imported already"):
        importlib.import_module("early.maker")


def test_a_missing_module_is_missing_as_ever(package):
    when_imported("early.nowhere", replace_made)
    with pytest.raises(ModuleNotFoundError, match=r"early\.nowhere"):
        importlib.import_module("early.nowhere")
