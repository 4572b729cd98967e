"""Importing EvenPipe changes nothing: no patch, no finder, and nothing heavy, before somebody asks."""

import subprocess
import sys
import textwrap

import pytest

IMPORTS_EVERYTHING = """
    import os, pkgutil, sys, types
    from importlib import import_module
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed, megatron.core.models.gpt, megatron.core.optimizer, torch._dynamo
    import megatron.core.pipeline_parallel.schedules

    def symbols():
        found = {}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in ("torch", "megatron", "deepspeed") and isinstance(module, types.ModuleType):
                for key, value in list(vars(module).items()):
                    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
                        found[name, key] = value
                        if isinstance(value, type):
                            found |= {(name, key, inner): held for inner, held in list(vars(value).items())
                                      if callable(held) or isinstance(held, (property, staticmethod, classmethod))}
        return found

    finders, before, hook = list(sys.meta_path), symbols(), sys.excepthook
    assert len(before) > 20000, len(before)
    import evenpipe
    for module in pkgutil.walk_packages(evenpipe.__path__, "evenpipe."):
        if module.name != "evenpipe.__main__":
            import_module(module.name)
    after = symbols()
    changed = [name for name, value in before.items() if after.get(name) is not value]
    assert not changed, changed
    assert sys.meta_path == finders, sys.meta_path
    assert sys.excepthook is hook

    from evenpipe.deepspeed.catalogue import catalogue as of_deepspeed
    from evenpipe.megatron_lm.catalogue import catalogue as of_megatron
    from evenpipe.upstream import APPLIED
    items = [item for item in (*of_megatron(), *of_deepspeed()) if item.is_replaced]
    assert len(items) > 50
    assert not [item.name for item in items if item.check() == APPLIED]
"""


def run(program: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gate
def test_importing_every_module_leaves_finders_and_frameworks_as_they_were() -> None:
    run(IMPORTS_EVERYTHING)


@pytest.mark.parametrize(("framework", "needed"), [("megatron", set()), ("deepspeed", {"numpy", "pydantic"})])
def test_asking_imports_no_framework_and_asking_twice_is_asking_once(framework: str, needed: set[str]) -> None:
    run(f"""
        import sys
        before = list(sys.meta_path)
        import evenpipe.{framework}
        assert sys.meta_path == before
        for _ in range(2):
            evenpipe.{framework}.install()
        assert len(sys.meta_path) == len(before) + 1
        heavy = {{"torch", "numpy", "pydantic", "megatron", "deepspeed", "matplotlib"}} & set(sys.modules)
        assert sorted(heavy) == {sorted(needed)}
    """)


def test_the_function_that_fits_is_imported_when_it_is_asked_for() -> None:
    run("""
        import sys
        import evenpipe
        assert [name for name in sys.modules if name.startswith("evenpipe")] == ["evenpipe"]
        assert "torch" not in sys.modules
        assert evenpipe.fit.__module__ == "evenpipe.fitting.megatron"
        assert "megatron.core" not in sys.modules
    """)


def test_what_is_asked_for_twice_is_applied_once() -> None:
    run("""
        import os
        os.environ["DS_ACCELERATOR"] = "cpu"
        import evenpipe.deepspeed
        evenpipe.deepspeed.install()
        evenpipe.deepspeed.install()
        import deepspeed
        evenpipe.deepspeed.install()
        assert hasattr(deepspeed.initialize, "__evenpipe_patch__")
        assert not hasattr(deepspeed.initialize.__wrapped__, "__evenpipe_patch__")
    """)


def test_training_in_plain_torch_imports_no_framework() -> None:
    run("""
        import sys
        import evenpipe.train.launch, evenpipe.train.plain, evenpipe.train.process
        found = {"megatron", "deepspeed", "evenpipe.megatron", "evenpipe.deepspeed"} & set(sys.modules)
        assert not found, found
    """)


def test_a_script_with_bpipe_imports_what_bpipe_needs() -> None:
    """Nothing of plans, simulations, steps of 2BW or tuning."""
    pytest.importorskip("megatron.core")
    run("""
        import ast, inspect, sys
        import evenpipe.megatron_lm.install
        from evenpipe.megatron.schedule import PipelineSchedule, in_place_of_megatron
        from evenpipe.megatron_lm import start
        # What every run with a flag imports when it starts, whichever flag that is.
        [plug_in] = ast.parse(inspect.getsource(start._plug_in)).body
        always = [line for line in plug_in.body if isinstance(line, ast.ImportFrom)]
        assert len(always) > 3
        exec(ast.unparse(ast.Module(always, [])))
        in_place_of_megatron(PipelineSchedule("1f1b", bpipe=True))
        loaded = [name for name in sys.modules if name.startswith("evenpipe.")]
        rooms = {name.split(".")[1] for name in loaded}
        needed = {"megatron_lm", "megatron", "report", "runtime", "schedule", "settings", "torch", "train"}
        needed |= {"upstream", "wording"}
        assert rooms == needed, rooms
        assert len(loaded) <= 90, len(loaded)
    """)


@pytest.mark.parametrize(("words", "status"), [("--version", 0), ("--help", 0), ("", 2), ("frobnicate", 2)])
def test_what_names_no_command_answers_without_any_package(words: str, status: int) -> None:
    run(f"""
        import sys
        before = set(sys.modules)
        from evenpipe.cli.main import main
        try:
            main({words.split()})
        except SystemExit as ended:
            assert ended.code == {status}
        packages = {{name.partition(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names)
        assert packages == {{"evenpipe"}}, packages
        rooms = {{name.split(".")[1] for name in sys.modules if name.startswith("evenpipe.")}}
        assert rooms <= {{"cli", "wording"}}, rooms
    """)


def test_helps_and_looks_at_a_schedule_need_neither_torch_nor_matplotlib_nor_a_framework() -> None:
    run("""
        import sys
        from evenpipe.cli.main import main
        from evenpipe.cli.parser import COMMANDS

        heavy = {"torch", "matplotlib", "megatron", "deepspeed"}

        def check(*words, without=frozenset()):
            try:
                ended = main(words)
            except SystemExit as end:
                ended = end.code
            found = (heavy | without) & set(sys.modules)
            assert (ended, found) == (0, set()), (words, ended, found)

        for command in ("schedule", "simulate"):
            words = (command, "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2")
            check(*words, without={"evenpipe.megatron", "evenpipe.deepspeed", "evenpipe.train"})
        for command in COMMANDS:
            if command not in ("costs", "patches"):
                check(command, "--help")
    """)
