"""`evenpipe run` is `python SCRIPT FLAGS` with EvenPipe in it."""

import json
import os
import subprocess
import sys
import textwrap

import pytest


def run(script, *flags, before=(), environment=None):
    return subprocess.run(
        [sys.executable, "-m", "evenpipe", "run", *before, script, *flags],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, **(environment or {})},
    )


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "folder" / "train.py"
        path.parent.mkdir()
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def test_the_script_is_main_with_its_own_flags_and_folder(script):
    path = script(
        """
        import json, sys
        if __name__ == "__main__":
            print(json.dumps([sys.argv, sys.path[0], __file__, sys.modules["__main__"].__dict__ is globals()]))
        """
    )
    done = run(path, "--bpipe", "--help", "-h")
    assert json.loads(done.stdout) == [[path, "--bpipe", "--help", "-h"], os.path.dirname(path), path, True], (
        done.stderr
    )


def test_spawned_children_know_the_script_and_have_the_drop_in(script):
    path = script(
        """
        import multiprocessing, sys

        def work(value):
            installed = any(type(finder).__module__ == "evenpipe.upstream.imports" for finder in sys.meta_path)
            return value + 1, installed, __name__

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.apply(work, (41,)))
        """
    )
    done = run(path)
    assert done.stdout.strip() == "(42, True, '__mp_main__')", done.stderr


def test_an_error_is_told_as_ever(script):
    path = script(
        """
        import atexit, sys
        atexit.register(lambda: print("flushed"))
        told = sys.excepthook
        sys.excepthook = lambda *error: (told(*error), print("hooked"))
        raise OSError("broken stage")
        """
    )
    done = run(path)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "OSError: broken stage"
    assert done.stdout.split() == ["hooked", "flushed"]


def test_the_script_is_compiled_on_its_own_terms(script):
    path = script(
        """
        import dataclasses

        @dataclasses.dataclass
        class Options:
            size: int

        print(dataclasses.fields(Options)[0].type)
        """
    )
    assert run(path).stdout.strip() == "<class 'int'>"


def test_the_exit_status_is_the_scripts(script):
    assert run(script("raise SystemExit(7)")).returncode == 7


def test_a_missing_script_is_one_line():
    done = run("no/such/pretrain_gpt.py")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "evenpipe run: error: no/such/pretrain_gpt.py: No such file or directory: "
        "name the script to run, such as pretrain_gpt.py"
    ]


def test_with_deepspeed_the_script_and_its_children_are_as_ever(script):
    path = script(
        """
        import json, multiprocessing, sys

        def work():
            return __name__

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                child = pool.apply(work)
            print(json.dumps([sys.argv, "evenpipe.deepspeed" in sys.modules, "torch" in sys.modules, child]))
        """
    )
    done = run(path, "--local_rank", "0", before=["--deepspeed"])
    assert json.loads(done.stdout) == [[path, "--local_rank", "0"], True, False, "__mp_main__"], done.stderr
