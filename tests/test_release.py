"""What a release consists of: the archives, the changelog, the public names, and the releases that it works with."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from hashlib import sha256
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

import evenpipe
from evenpipe.deepspeed.supported import RELEASES as DEEPSPEED
from evenpipe.megatron.supported import RELEASES as MEGATRON

ROOT = Path(__file__).resolve().parents[1]
API = (ROOT / "docs" / "api.md").read_text()
SETUP = (ROOT / "setup.py").read_text()
PINNED = re.findall(r"^([\w.-]+)==([^;\s]+)(.*)$", (ROOT / ".ci" / "requirements.txt").read_text(), re.M)
PINS = {name: version for name, version, when in PINNED if "python_version <" not in when}
PREPARE = (ROOT / ".ci" / "prepare.py").read_text()


def table(name: str) -> list[list[str]]:
    """The rows of a table of docs/api.md, without its head."""
    (lines,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- end of {name} -->", API, re.S)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()[2:]]


def public() -> set[tuple[str, str]]:
    rows = table("names")
    return {(module.strip("`"), name) for module, names, _ in rows for name in re.findall(r"`(\w+)`", names)}


def test_the_version_has_a_section_of_the_changelog():
    found = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d{2}-\d{2}$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert found[0] == evenpipe.__version__
    assert found == sorted(found, key=lambda text: [int(part) for part in text.split(".")], reverse=True)


def test_a_public_name_is_one_of_its_module_and_says_what_it_does():
    for module, name in sorted(public()):
        found = importlib.import_module(module)
        assert name in found.__all__
        assert name.startswith("__") or getattr(found, name).__doc__, name


def test_what_pages_import_is_public():
    shown = set()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S):
            for module, names in re.findall(r"^\s*from (evenpipe[\w.]*) import (.+)$", block, re.M):
                shown |= {(module, name.strip()) for name in names.partition("#")[0].split(",")}
    assert len(shown) > 8
    assert shown <= public()


def test_a_module_that_pages_name_for_a_name_has_it_in_the_table():
    """As in "`half_layers(plan).apply()` (`evenpipe.megatron.planned_layout`)"."""
    named = set()
    for page in sorted((ROOT / "docs").glob("*.md")):
        found = re.findall(r"`([A-Za-z_]+)\b[^`]*`\s+\(`(evenpipe(?:\.\w+)+)`\)", page.read_text())
        named |= {(module, name) for name, module in found if hasattr(importlib.import_module(module), name)}
    assert len(named) > 3
    assert named <= public()


def _required(name: str) -> SpecifierSet:
    (found,) = re.findall(rf'"{name}([<>=].*?)"', SETUP)
    return SpecifierSet(found)


def test_the_table_of_releases_is_that_of_the_code_the_metadata_and_the_pins():
    rows = {name: (supported, tested) for name, supported, tested in table("releases")}
    assert rows["megatron-core"][0] == rows["Megatron-LM"][0] == f"{min(MEGATRON)} to {max(MEGATRON)}"
    assert rows["DeepSpeed"][0] == f"{DEEPSPEED[0]} to {DEEPSPEED[-1]}"
    for release in re.findall(r"[\d.]+\d", rows["megatron-core"][1]):
        assert release in _required("megatron-core")
    beside = re.findall(r'"(0\.[\d.]+)"', "".join(re.findall(r"^(?:RELEASES|NEWER) = .*$", PREPARE, re.M)))
    assert rows["megatron-core"][1].split(", ") == sorted([*beside, PINS["megatron-core"]])
    assert {release.rpartition(".")[0] for release in rows["megatron-core"][1].split(", ")} == set(MEGATRON)
    assert all(release in _required("deepspeed") for release in DEEPSPEED)
    for name, package in (("torch", "torch"), ("DeepSpeed", "deepspeed"), ("transformers", "transformers")):
        assert rows[name][1].split(";")[0] == PINS[package]
        assert PINS[package] in _required(package)
    for name in ("torch", "transformers"):
        assert f">={rows[name][0].removeprefix('≥ ')}" == str(_required(name))
    (python,) = re.findall(r'python_requires=">=(.*?)"', SETUP)
    assert rows["Python"][0] == f"≥ {python}"


def built(folder: Path) -> dict[str, Path]:
    """The archives of a copy of the tree, by what their names end with, built without a network."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("not a checkout: what belongs to the tree is not known")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "tree" / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "tree"],
        env=os.environ | {"SOURCE_DATE_EPOCH": "1700000000", "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return {path.suffix: path for path in (folder / "dist").iterdir()}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Path]]:
    return [built(tmp_path_factory.mktemp(name)) for name in ("one", "another folder")]


@pytest.mark.gate
def test_two_builds_have_the_same_bytes(archives):
    digests = [{end: sha256(path.read_bytes()).hexdigest() for end, path in each.items()} for each in archives]
    assert digests[0].keys() == {".whl", ".gz"}
    assert digests[0] == digests[1]


@pytest.mark.gate
def test_a_wheel_that_is_installed_elsewhere_works(archives, tmp_path):
    target, wheel = tmp_path / "target", archives[0][".whl"]
    offline = ("--no-deps", "--no-index", "--quiet", "--target", str(target))
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, str(wheel)], check=True, timeout=300)

    def run(*words: str) -> str:
        """As of an interpreter in another folder, without this tree; the script is the one of the entry point."""
        environment = os.environ | {"PYTHONPATH": str(target), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, str(target / "bin" / "evenpipe"), *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("--version") == f"evenpipe {evenpipe.__version__}\n"
    assert "bound: 3 live" in run("schedule", "--schedule", "1f1b", "--stages", "4", "--micro-batches", "8", "--bpipe")
    gpt = ("--model", "gpt3-96b", "--cluster", "4x8-a100-80gb", "--global-batch-size", "128")
    parallel = ("--tensor-parallel", "4", "--stages", "8", "--micro-batch-size", "1")
    run("estimate", *gpt, *parallel)  # descriptions are data of the wheel
    run(
        "recipe", "gpt", *gpt, "--framework", "megatron", *parallel, "--launcher", "slurm", "--out", "DIR"
    )  # so are templates
    assert any((tmp_path / "DIR").iterdir())


@pytest.mark.gate
def test_the_metadata_of_a_wheel(archives, tmp_path):
    import zipfile

    with zipfile.ZipFile(archives[0][".whl"]) as wheel:
        wheel.extractall(tmp_path)
        names = wheel.namelist()
    (folder,) = tmp_path.glob("*.dist-info")
    about: Any = PathDistribution(folder).metadata
    assert about["Version"] == evenpipe.__version__
    assert {"megatron", "deepspeed", "huggingface", "report", "search"} <= set(about.get_all("Provides-Extra"))
    assert "Typing :: Typed" in about.get_all("Classifier")
    readme = about.get_payload()
    assert readme.startswith("# EvenPipe")
    assert not re.findall(r"\]\((?!https?:)", readme), "links that lead nowhere on a package index"
    assert "evenpipe/py.typed" in names
    assert not [name for name in names if not name.startswith(("evenpipe/", "evenpipe-"))]
