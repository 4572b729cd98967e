"""Builds .venv from the pins in requirements.txt, or leaves it alone when it fits them already.

A virtual environment cannot be built aside and moved, so it is built in place and trusted only once its stamp stands,
which is written last. Progress goes to standard error; with --releases the folders of the other megatron-core releases
go to standard output, joined by the path separator. With --system there is no .venv: what this Python lacks is put into
folders, which go to standard output, and its own packages stay as they are.
"""

import argparse
import contextlib
import csv
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / ".ci" / "requirements.txt"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "evenpipe-stamp.json"
LOG = ROOT / "build" / "prepare.log"
LOCK = ROOT / "build" / "prepare.lock"

RELEASES = ("0.14.0", "0.15.3", "0.16.0")  # of megatron-core, which the tests run against besides the pinned one
NEWER = ("0.17.1", "0.18.2", "0.19.0")  # need Python 3.12, and triton, which the CUDA build of torch brings along
FIRST = ("pip", "setuptools")  # they install the rest: an old pip has other messages and no editable installs
SCRIPTED = ("deepspeed",)  # have no wheel anywhere and nothing to compile when they are installed
HEARTBEAT_S = 15.0

# What `make gpu` needs beside the torch of a container or a module, and then what some of its parts need.
BESIDE_TORCH = (
    "numpy rich markdown-it-py mdurl Pygments "
    "pydantic pydantic_core annotated-types typing_extensions typing-inspection",
    "megatron-core einops packaging protobuf PyYAML Jinja2 MarkupSafe",
    "deepspeed einops hjson msgpack ninja packaging psutil py-cpuinfo tqdm",
)

# Settings that would send packages elsewhere, make pip silent, or hold versions down (containers pin their own torch).
DISTURBING = ("PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_QUIET", "PIP_LOG", "PIP_REPORT")
DISTURBING += ("PIP_CONSTRAINT", "PIP_REQUIRE_VIRTUALENV")

FETCHED = re.compile(r"\s*(?:Collecting|Processing|Downloading|Using cached) (\S+)")
SOURCE_ARCHIVE = re.compile(r"(.+)\.(?:tar\.gz|zip)")
WHEEL = re.compile(r"([^-]+-[^-]+)-.+\.whl")
CULPRITS = (
    re.compile(r"No matching distribution found for ([\w.\-\[\]=]+)"),
    re.compile(r"Failed (?:to build|building wheel for) '?([\w.\-]+)"),
)
UNREACHABLE = re.compile(r"NewConnectionError|Connection refused|name resolution|ConnectTimeout|ProxyError|Max retries")
BROKEN_OFF = re.compile(r"IncompleteRead|Read timed out|Connection reset|Connection broken|\b50[0234] Server Error")


class Failure(Exception):
    """What went wrong, in one line for the user."""


def say(text: str) -> None:
    print(f"evenpipe: {text}", file=sys.stderr, flush=True)


def key(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def environment_key() -> str:
    return key(PINS.read_text(), ROOT)


@contextlib.contextmanager
def alone() -> Iterator[IO[str]]:
    """One preparation at a time. The installing child inherits the lock, so an orphan keeps it until it has ended."""
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is preparing .venv; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)
        yield lock


@contextlib.contextmanager
def heartbeat(current: list[str]) -> Iterator[None]:
    """Repeats what is at work (current[-1]) while it stays silent."""
    done = threading.Event()

    def beat() -> None:
        start = time.monotonic()
        while not done.wait(HEARTBEAT_S):
            say(f"  ... {current[-1]} ({time.monotonic() - start:.0f} s)")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def intact(folder: Path) -> set[str]:
    """Name-version, as pip spells it on disk, of every distribution in a folder whose files are all there, whole."""
    found = set()
    for record in folder.glob("*.dist-info/RECORD"):
        entries = csv.reader(record.read_text(errors="replace").splitlines())
        if all(row[0].endswith(".pyc") or whole(folder / row[0], row[-1]) for row in entries if row):
            found.add(record.parent.name.removesuffix(".dist-info"))
    return found


def whole(path: Path, size: str) -> bool:
    """Whether a file is there with the size that was recorded, if one was."""
    with contextlib.suppress(OSError):
        found = path.stat().st_size
        return not size or found == int(size)
    return False


def site_packages() -> Path:
    return Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(VENV)}))


def remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def has_compiler() -> bool:
    """Asks the compiler itself: macOS has a c++ that only says how to get one."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        with contextlib.suppress(OSError, ValueError):
            if subprocess.run([*shlex.split(name), "--version"], capture_output=True).returncode == 0:
                return True
    return False


def fail(what: str, output: list[str]) -> NoReturn:
    """Names the package that cannot be installed, and why, from what pip said."""
    text = "".join(output)
    culprit = next((match[1] for pattern in CULPRITS if (match := pattern.search(text))), what)
    if UNREACHABLE.search(text):
        reason = "the package index cannot be reached"
    elif "(from versions: none)" in text:
        reason = "the package index shows no release of it; is the index right, and in reach?"
    elif "No matching distribution" in text:
        reason = f"no release for Python {platform.python_version()} on {sysconfig.get_platform()} was found"
    else:
        errors = [line.strip() for line in output if line.lower().startswith("error:")]
        reason = errors[-1][len("error:") :].strip() if errors else "pip ended with an error"
    raise Failure(f"cannot install {culprit}: {reason}; the full log is {LOG}")


def attempt(python: str, arguments: list[str]) -> tuple[int, str, list[str]]:
    """Runs a Python's pip once; returns its exit status, what it was working on last, and its output."""
    environment = {name: value for name, value in os.environ.items() if name not in DISTURBING}
    command = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    current, output = ["pip"], []
    with (
        LOG.open("a") as log,
        subprocess.Popen(
            command + arguments,
            cwd=ROOT,
            env=environment | {"PIP_USER": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            close_fds=False,
        ) as process,
        heartbeat(current),
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=log, flush=True)
            output.append(line)
            if match := FETCHED.match(line):
                name = match[1].split("#")[0].rsplit("/", 1)[-1]
                wheel, source = WHEEL.fullmatch(name), SOURCE_ARCHIVE.fullmatch(name)
                current.append(wheel[1] if wheel else source[1] if source else name)
                if wheel or source:
                    say(f"  {current[-1]}")
                # Every other pin without compiled parts has a wheel for all platforms. Some builds leave their compiled
                # part out without a word when there is no compiler, so this is the moment to notice.
                if source and not source[1].startswith(SCRIPTED) and not has_compiler():
                    process.terminate()
                    raise Failure(
                        f"cannot install {source[1]}: it has no wheel for Python {platform.python_version()} on "
                        f"{sysconfig.get_platform()} and no C++ compiler was found to build it: install one "
                        f"(Debian, Ubuntu: apt install g++; macOS: xcode-select --install); the full log is {LOG}"
                    )
            elif line.startswith("Installing collected packages:"):
                current.append("unpacking")
    return process.returncode, current[-1], output


def install(what: str, *arguments: str, python: str = str(PYTHON)) -> None:
    """Installs with pip, saying on the way which package is at work; raises Failure."""
    say(f"installing {what}")
    status, last, output = attempt(python, list(arguments))
    if status and BROKEN_OFF.search("".join(output)):
        say("the download broke off; once more")
        status, last, output = attempt(python, list(arguments))
    if status:
        fail(last, output)


def create() -> None:
    base = getattr(sys, "_base_executable", None) or sys.executable  # a venv made from .venv's own Python would lose it
    say(f"creating .venv with Python {platform.python_version()} ({base})")
    remove(VENV)
    made = subprocess.run([base, "-m", "venv", str(VENV)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    LOG.write_text(made.stdout + made.stderr)
    if made.returncode:
        remedy = "Debian, Ubuntu: apt install python3-venv"
        raise Failure(f"{base} cannot create a virtual environment ({remedy}); the full log is {LOG}")


def pins_of(names: Iterable[str]) -> list[str]:
    """The lines of these packages; some have one for each Python."""
    lines = PINS.read_text().splitlines()
    return [line.strip() for line in lines if re.split(r"[^\w.\-]", line)[0] in set(names)]


def fill() -> None:
    if first := pins_of(FIRST):
        install("pip's own tools", *first)
    if torch := pins_of(["torch"]):  # its builds differ in what else they need: it resolves them, within the pins
        install("torch", *torch, "-c", str(PINS))
    install(f"the pins of {PINS.relative_to(ROOT)}", "--no-deps", "-r", str(PINS))


def trusted_stamp() -> dict[str, str | list[str]]:
    """What .venv was built from, if its Python runs and is this one, and nothing of it is lost; empty otherwise."""
    ask = [str(PYTHON), "-I", "-c", "import sys; print(sys.version)"]
    try:
        answer = subprocess.run(ask, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        stamp: dict[str, str | list[str]] = json.loads(STAMP.read_text())
        fits = stamp["environment"] == environment_key() and intact(site_packages()).issuperset(stamp["holds"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return stamp if fits and answer.returncode == 0 and answer.stdout.strip() == sys.version else {}


def write_stamp(stamp: dict[str, str | list[str]]) -> None:
    temporary = STAMP.with_suffix(".new")
    temporary.write_text(json.dumps(stamp))
    temporary.replace(STAMP)


def prepare() -> None:
    """Brings .venv up to the pins and the package into it."""
    stamp = trusted_stamp()
    if not stamp:
        create()
        fill()
        stamp = {"environment": environment_key(), "holds": sorted(intact(site_packages()))}
        write_stamp(stamp)
    package = key(*(path.read_text() for path in (ROOT / "setup.py", ROOT / "pyproject.toml")))
    if stamp.get("package") != package or not any(name.startswith("evenpipe-") for name in intact(site_packages())):
        install("evenpipe", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
        write_stamp(stamp | {"package": package})
        say(".venv is ready")


def installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def placed(folder: Path, what: str, *arguments: str, python: str = str(PYTHON)) -> Path:
    """`folder`, with these packages in it, whole; to be put on the import path."""
    partial = folder.with_suffix(".partial")
    remove(partial)
    remove(folder)
    install(what, "--target", str(partial), *arguments, python=python)
    partial.replace(folder)
    return folder


def system() -> list[Path]:
    """Folders of what this Python, which has a torch of its own, lacks; what only parts need may be out of reach."""
    if importlib.util.find_spec("torch") is None:
        raise Failure(f"{sys.executable} has no torch: name a Python that has: make gpu SYSTEM=1 PYTHON=...")
    folders = []
    for names in BESIDE_TORCH:
        if not (pins := pins_of([name for name in names.split() if not installed(name)])):
            continue
        folder = ROOT / "build" / "beside-torch" / key(sys.version, *pins)[:16]
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            what = f"what {sys.executable} lacks: {', '.join(pins)}"
            there = folder.is_dir()
            folders.append(folder if there else placed(folder, what, "--no-deps", *pins, python=sys.executable))
        except Failure as error:
            if names == BESIDE_TORCH[0]:
                raise
            say(f"{error}; parts that need it are skipped")
    return folders


def release(version: str) -> Path:
    """The folder that holds one more megatron-core release."""
    pin = f"megatron-core=={version}"
    folder = VENV / "releases" / f"megatron-core-{version}"
    there = f"megatron_core-{version}" in intact(folder)
    return folder if there else placed(folder, f"{pin} for the tests", "--no-deps", pin)


def oldest_torch() -> Path:
    """The folder that holds the oldest torch that setup.py declares, and what it needs."""
    declared = re.search(r"torch>=([\d.]+)", (ROOT / "setup.py").read_text())
    assert declared is not None, "setup.py says which torch the package needs"
    pin = f"torch=={declared[1]}.0"
    folder = VENV / "releases" / pin.replace("==", "-")
    return folder if folder.is_dir() else placed(folder, f"{pin} for the tests", pin)


def releases() -> tuple[str, ...]:
    """The other megatron-core releases that this Python and what is in .venv can import."""
    triton = any(site_packages().glob("triton-*.dist-info"))
    return (*RELEASES, *(NEWER if triton and sys.version_info >= (3, 12) else ()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", action="store_true", help="install other megatron-core releases too; print where")
    parser.add_argument("--oldest-torch", action="store_true", help="install the oldest torch too; print where")
    parser.add_argument("--system", action="store_true", help="no .venv: install what this Python lacks; print where")
    arguments = parser.parse_args()
    try:
        with alone():
            if arguments.system:
                folders = system()
            else:
                prepare()
                folders = [release(version) for version in releases()] if arguments.releases else []
                folders += [oldest_torch()] if arguments.oldest_torch else []
    except (Failure, OSError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run starts over where needed")
        return 130
    if folders:
        print(os.pathsep.join(map(str, folders)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
