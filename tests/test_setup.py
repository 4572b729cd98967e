"""What .ci/prepare does with every state of .venv, and the one line it says when it cannot help."""

import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.gate

ROOT = Path(__file__).resolve().parent.parent
OLD_PYTHONS = [
    path
    for minor in (9, 8, 7, 6)
    for path in (shutil.which(f"python3.{minor}"), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
    if path and subprocess.run([path, "--version"], capture_output=True).returncode == 0
]


def write_wheel(folder: str | Path, name: str, version: str) -> str:
    info, file = f"{name}-{version}.dist-info", f"{name}-{version}-py3-none-any.whl"
    module = f"version = {version!r}"
    with zipfile.ZipFile(f"{folder}/{file}", "w") as wheel:
        wheel.writestr(f"{name}.py", module)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,{len(module)}\n")
    return file


BUILD_BACKEND = f"""
import zipfile
from pathlib import Path

{inspect.getsource(write_wheel)}
def build_editable(folder, config_settings=None, metadata_directory=None):
    return write_wheel(folder, "evenpipe", "0.1.0")
"""


class Checkout:
    """A small project around the real scripts; its only pin, probe 1.0, lies in a folder beside it."""

    def __init__(self, root: Path, packages: Path) -> None:
        self.root, self.packages = root, packages
        self.site = root / ".venv/lib/python{}.{}/site-packages".format(*sys.version_info)

    def prepare(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.packages)}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        return subprocess.run(
            [self.root / ".ci" / "prepare", *arguments],
            env=clean | offline | {"PYTHON": sys.executable} | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=800,
        )

    def script(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location("prepare", self.root / ".ci" / "prepare.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Prepared from a .venv that is a file."""
    root, packages = tmp_path_factory.mktemp("checkout with space"), tmp_path_factory.mktemp("packages")
    (root / ".ci").mkdir()
    for name in ("prepare", "prepare.py"):
        shutil.copy(ROOT / ".ci" / name, root / ".ci")
    (root / ".ci" / "requirements.txt").write_text("# pins\nprobe==1.0\n")
    (root / "setup.py").write_text('# "torch>=2.10"\n')
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "evenpipe"\nversion = "0.1.0"\n'
    )
    (root / "backend.py").write_text(BUILD_BACKEND)
    write_wheel(packages, "probe", "1.0")
    (root / ".venv").write_text("not a folder\n")
    made = Checkout(root, packages)
    done = made.prepare()
    assert done.returncode == 0, done.stderr
    assert "probe-1.0" in done.stderr, "says which package is being installed"
    return made


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The last line, which says it all: nothing that looks like an error stands before it."""
    *before, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert not [line for line in before if "rror" in line or "cannot" in line or line.startswith(" ")]
    return last


def test_a_file_in_place_of_venv_is_replaced_by_an_environment_that_holds_the_pins(checkout: Checkout) -> None:
    ask = [str(checkout.root / ".venv/bin/python"), "-c", "import probe; print(probe.version)"]
    assert subprocess.run(ask, capture_output=True, text=True).stdout == "1.0\n"


def test_a_second_run_does_nothing(checkout: Checkout) -> None:
    again = checkout.prepare()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_two_runs_at_once_take_turns(checkout: Checkout) -> None:
    fcntl = pytest.importorskip("fcntl")
    with (checkout.root / "build" / "prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(subprocess.TimeoutExpired) as waited:
            subprocess.run([sys.executable, str(checkout.root / ".ci/prepare.py")], capture_output=True, timeout=1.5)
    assert b"waiting" in (waited.value.stderr or b"")


@pytest.fixture
def put_back(checkout: Checkout) -> Iterator[None]:
    """Undoes what a test removed from .venv, so that it need not be built once more."""
    venv, saved = checkout.root / ".venv", checkout.root / "saved"
    shutil.copytree(venv, saved, symlinks=True, copy_function=os.link)
    yield
    shutil.rmtree(venv, ignore_errors=True)
    saved.rename(venv)


def replace(path: Path, text: str, mode: int = 0o644) -> None:
    path.unlink()
    path.write_text(text)
    path.chmod(mode)


DAMAGES: dict[str, Callable[[Checkout], object]] = {
    "missing": lambda c: shutil.rmtree(c.root / ".venv"),
    "half created": lambda c: shutil.rmtree(c.root / ".venv/lib"),
    "install interrupted": lambda c: (c.root / ".venv/evenpipe-stamp.json").unlink(),
    "stamp unreadable": lambda c: replace(c.root / ".venv/evenpipe-stamp.json", "[tor"),
    "python deleted": lambda c: (c.root / ".venv/bin/python").unlink(),
    "python broken": lambda c: replace(c.root / ".venv/bin/python", "#!/nowhere\n", 0o755),
    "a package's file deleted": lambda c: (c.site / "probe.py").unlink(),
    "a package's file cut short": lambda c: replace(c.site / "probe.py", ""),
    "a package uninstalled": lambda c: shutil.rmtree(c.site / "probe-1.0.dist-info"),
    "a package of another version": lambda c: (c.site / "probe-1.0.dist-info").rename(c.site / "probe-2.0.dist-info"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_venv_is_not_trusted(checkout: Checkout, put_back: None, damage: str) -> None:
    script = checkout.script()
    assert script.trusted_stamp()
    DAMAGES[damage](checkout)
    assert not script.trusted_stamp()


def test_outdated_pins_and_another_python_are_not_trusted(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    script = checkout.script()
    monkeypatch.setattr(sys, "version", "3.10.0 (another build)")
    assert not script.trusted_stamp()
    monkeypatch.undo()
    assert script.trusted_stamp()
    monkeypatch.setattr(script, "PINS", checkout.root / "setup.py")
    assert not script.trusted_stamp()


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling link", "nothing"])
def test_whatever_lies_in_the_way_is_removed_but_not_what_a_link_points_to(
    checkout: Checkout, tmp_path: Path, kind: str
) -> None:
    path, target = tmp_path / ".venv", tmp_path / "elsewhere"
    target.mkdir()
    match kind:
        case "file":
            path.touch()
        case "folder":
            (path / "bin").mkdir(parents=True)
        case "link":
            path.symlink_to(target)
        case "dangling link":
            path.symlink_to(tmp_path / "gone")
    checkout.script().remove(path)
    assert not os.path.lexists(path)
    assert target.exists()


@pytest.mark.skipif(not OLD_PYTHONS, reason="no Python before 3.10 on this machine")
def test_a_python_that_is_too_old_is_named(checkout: Checkout) -> None:
    line = complaint(checkout.prepare(PYTHON=str(OLD_PYTHONS[0])))
    assert line.startswith(f"evenpipe: {OLD_PYTHONS[0]} is Python 3.")
    assert "needs Python 3.10 or newer" in line


def test_no_python_at_all(checkout: Checkout) -> None:
    assert "no working Python under the name nowhere" in complaint(checkout.prepare(PYTHON="nowhere"))


def test_a_package_index_out_of_reach(checkout: Checkout) -> None:
    closed = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    line = complaint(checkout.prepare("--releases", **closed))
    log = checkout.root / "build" / "prepare.log"
    assert line == (
        f"evenpipe: cannot install megatron-core==0.14.0: the package index cannot be reached; the full log is {log}"
    )
    assert "127.0.0.1" in log.read_text()


def test_a_package_without_a_release_for_this_platform(checkout: Checkout, tmp_path: Path) -> None:
    write_wheel(tmp_path, "megatron_core", "0.13.0")
    line = complaint(checkout.prepare("--releases", PIP_FIND_LINKS=str(tmp_path)))
    assert line.startswith("evenpipe: cannot install megatron-core==0.14.0: no release for Python 3.")


def test_newer_releases_are_for_a_newer_python_and_a_torch_that_brings_triton(checkout: Checkout) -> None:
    prepare = checkout.script()
    assert prepare.releases() == prepare.RELEASES
    triton = checkout.site / "triton-3.7.1.dist-info"
    triton.mkdir()
    try:
        newer = prepare.NEWER if sys.version_info >= (3, 12) else ()
        assert prepare.releases() == (*prepare.RELEASES, *newer)
    finally:
        triton.rmdir()


def test_a_package_that_must_be_compiled_without_a_compiler(checkout: Checkout, tmp_path: Path) -> None:
    source = tmp_path / "megatron_core-0.14.0"
    source.mkdir()
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.14.0\n")
    (source / "setup.py").write_text("raise SystemExit('the build was started')\n")
    with tarfile.open(tmp_path / f"{source.name}.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "dirname").symlink_to(shutil.which("dirname") or "/usr/bin/dirname")
    line = complaint(checkout.prepare("--releases", PATH=str(tools), CXX="", PIP_FIND_LINKS=str(tmp_path)))
    assert line.startswith("evenpipe: cannot install megatron_core-0.14.0: it has no wheel for Python 3.")
    assert "no C++ compiler was found" in line


@pytest.fixture
def with_torch(checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Python of a cluster's module: it has a torch and a numpy, found by PYTHONPATH, and pip, and nothing else."""
    python = tmp_path / "python"
    subprocess.run([sys.executable, "-m", "venv", python], check=True)
    module = tmp_path / "module"
    for name, version in (("torch", "2.10.0a0+nv"), ("numpy", "1.26")):
        zipfile.ZipFile(tmp_path / write_wheel(tmp_path, name, version)).extractall(module)
    for name in ("numpy", "rich", "megatron_core", "einops"):
        write_wheel(checkout.packages, name, "9.0")
    pins = checkout.root / ".ci" / "requirements.txt"
    before = pins.read_text()
    pins.write_text(
        'numpy==9.0\nrich==8.0; python_version < "3"\nrich==9.0; python_version >= "3"\n'
        "torch==9.0\nmegatron-core==9.0\neinops==9.0\ndeepspeed==9.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(module))
    yield python / "bin" / "python"
    pins.write_text(before)


def test_what_a_python_with_its_own_torch_lacks_is_put_beside_it(checkout: Checkout, with_torch: Path) -> None:
    """The constraint is one of a container's; deepspeed has no release here, and only a part needs it."""
    constraint = with_torch.with_name("constraint.txt")
    constraint.write_text("rich==7.0\n")
    before = sorted(with_torch.parents[1].rglob("*.dist-info"))
    given = {"PYTHON": str(with_torch), "PIP_CONSTRAINT": str(constraint), "PIP_REQUIRE_VIRTUALENV": "1"}
    done = checkout.prepare("--system", **given)
    assert done.returncode == 0, done.stderr
    assert "cannot install deepspeed==9.0" in done.stderr.splitlines()[-1]
    assert "parts that need it are skipped" in done.stderr.splitlines()[-1]
    found = {path.name for folder in done.stdout.strip().split(os.pathsep) for path in Path(folder).glob("*.py")}
    assert found == {"rich.py", "megatron_core.py", "einops.py"}
    assert sorted(with_torch.parents[1].rglob("*.dist-info")) == before
    again = checkout.prepare("--system", **given)
    assert again.stdout == done.stdout
    assert "rich" not in again.stderr


def test_a_python_without_torch_is_named(checkout: Checkout, with_torch: Path) -> None:
    line = complaint(checkout.prepare("--system", PYTHON=str(with_torch), PYTHONPATH=""))
    assert line == f"evenpipe: {with_torch} has no torch: name a Python that has: make gpu SYSTEM=1 PYTHON=..."


def test_a_containers_constraint_does_not_bind_the_pins(checkout: Checkout, put_back: None, tmp_path: Path) -> None:
    constraint = tmp_path / "constraint.txt"
    constraint.write_text("probe==2.0\n")
    (checkout.root / ".venv/evenpipe-stamp.json").unlink()
    done = checkout.prepare(PIP_CONSTRAINT=str(constraint))
    assert done.returncode == 0, done.stderr


def test_the_oldest_torch_is_the_one_that_is_declared(checkout: Checkout, tmp_path: Path) -> None:
    for name, version in (("torch", "2.10.0"), ("torch", "2.10.1")):
        write_wheel(tmp_path, name, version)
    done = checkout.prepare("--oldest-torch", PIP_FIND_LINKS=str(tmp_path))
    folder = checkout.root / ".venv/releases/torch-2.10.0"
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    assert [path.name for path in folder.glob("torch*.dist-info")] == ["torch-2.10.0.dist-info"]
    again = checkout.prepare("--oldest-torch", PIP_FIND_LINKS=str(tmp_path / "nothing"))
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "")
