"""A recipe's folder as it is now: its files, its scripts read without running them, and the sizes in each file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from evenpipe.descriptions import Cluster, Model
from evenpipe.recipes.deepspeed import CONFIGURATION
from evenpipe.recipes.recipe import Framework, Launcher, RecipeError
from evenpipe.wording.validation import first_message

__all__ = ["UNKNOWN", "About", "Nodes", "Script", "Written", "nodes_of", "read_folder", "read_script"]

_JOB: Final = "job.yaml"


class About(BaseModel):
    """``recipe.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["evenpipe.recipe/1"]
    framework: Framework
    launcher: Launcher
    release: str
    model: Model
    cluster: Cluster


@dataclass(frozen=True)
class Written:
    """``files``: texts by name, those that a job's ConfigMap has among them; ``job``: the PyTorchJob, if it is one."""

    about: About
    files: Mapping[str, str]
    job: Any = None

    @property
    def configuration(self) -> Any:
        """DeepSpeed's. Raises RecipeError where it is no JSON."""
        try:
            return json.loads(self.files[CONFIGURATION])
        except json.JSONDecodeError as error:
            raise RecipeError(f"{CONFIGURATION}:{error.lineno}: is no JSON: {error.msg}: correct it") from None


def read_folder(folder: Path) -> Written:
    """Raises RecipeError, one line that names the file, for one that is missing or cannot be read."""
    try:
        about = About.model_validate_json(_read(folder / "recipe.json"))
    except ValidationError as error:
        said = first_message(error, "document")
        raise RecipeError(f"{folder / 'recipe.json'}: not as `evenpipe recipe` wrote it: {said}") from None
    needed = ["train.sh"] + [CONFIGURATION] * (about.framework == "deepspeed")
    if about.launcher != "kubernetes":
        needed += {"slurm": ["launch.sbatch"], "deepspeed": ["launch.sh"]}.get(about.launcher, [])
        files = {name: _read(folder / name) for name in needed}
        hosts = folder / "hostfile"
        return Written(about, files | ({"hostfile": _read(hosts)} if hosts.exists() else {}))
    return _in_a_job(about, _read(folder / _JOB), needed)


def _in_a_job(about: About, text: str, needed: list[str]) -> Written:
    try:
        documents = [one for one in yaml.safe_load_all(text) if isinstance(one, dict)]
    except RecursionError:
        raise RecipeError(f"{_JOB}: is nested too deeply: correct it") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise RecipeError(f"{_JOB}{line}: is no YAML: {getattr(error, 'problem', error)}: correct it") from None
    kinds = {str(one.get("kind")): one for one in documents}
    said = (kinds.get("ConfigMap") or {}).get("data")
    files = said if isinstance(said, dict) else {}
    for name in needed:
        if not isinstance(files.get(name), str):
            raise RecipeError(f"{_JOB}: its ConfigMap has no {name}: keep what `evenpipe recipe` wrote")
    if "PyTorchJob" not in kinds:
        raise RecipeError(f"{_JOB}: has no PyTorchJob: keep what `evenpipe recipe` wrote")
    return Written(about, files, kinds["PyTorchJob"])


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise RecipeError(f"{path}: cannot be read: {reason}: name the folder that `evenpipe recipe` wrote") from None


#: Stands for what only a shell could tell.
UNKNOWN: Final = "\0"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNED: Final = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(\(?)")
#: Pieces of a word, and of a text between double quotes.
_PIECE: Final = re.compile(
    r"""(?P<plain>[^ \t\n;&|()'"\\$`]+) | '(?P<single>[^']*)' | \\(?P<escaped>.|\n|$) | "\$\{(?P<array>\w+)\[@\]\}"
    | (?P<double>") | (?P<expansion>[$`])""",
    re.VERBOSE,
)
_QUOTED: Final = re.compile(
    r"""(?P<plain>[^"\\$`]+) | \\(?P<escaped>[$`"\\\n]) | (?P<slash>\\) | (?P<expansion>[$`])""", re.VERBOSE
)
#: What is between braces, up to another expansion or an end.
_BRACED: Final = re.compile(r"""(?:[^'"}$]|'[^']*'|"[^"]*"|\$(?!\{))*""")


@dataclass
class Script:
    """``command``: the words of the command that starts EvenPipe."""

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)


def read_script(text: str, name: str) -> Script:
    """Raises RecipeError, which names the line, where a quote or an array is not closed, and without a command."""
    try:
        return _Reader(text, name).script()
    except RecursionError:
        raise RecipeError(f"{name}: has too many ${{...}} within another: write fewer of them") from None


class _Reader:
    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        self.found = Script()

    def script(self) -> Script:
        at = 0
        while at < len(self.text):
            at = self._command(at)
        if not self.found.command:
            raise RecipeError(f"{self.name}: starts no `-m evenpipe run`: have its last command be as it was written")
        return self.found

    def _command(self, at: int) -> int:
        """Read one command; what is no assignment and does not start EvenPipe is passed over."""
        at = self._blank(at, "\n;&|")
        assigned = _ASSIGNED.match(self.text, at)
        if assigned is not None and not assigned[2]:
            texts, at = self._word(assigned.end())
            self.found.variables[assigned[1]] = "".join(texts)
        elif assigned is not None:
            start = self._blank(assigned.end(), "\n")
            self.found.arrays[assigned[1]], at = self._words(start, ")", "\n")
            if at >= len(self.text):
                raise self._error(start, f"{assigned[1]}=( is not closed")
            at += 1
        else:
            words, at = self._words(at, "\n;&|()")
            if any(words[n : n + 2] == ["evenpipe", "run"] for n in range(len(words))):
                self.found.command = words
            at += self.text[at : at + 1] in ("(", ")")
        return at

    def _blank(self, at: int, also: str = "") -> int:
        """Return what is behind spaces, comments and continued lines."""
        return re.compile(rf"(?:[ \t{also}]|\\\n|\#[^\n]*)*").match(self.text, at).end()  # type: ignore[union-attr]

    def _words(self, at: int, ends: str, between: str = "") -> tuple[list[str], int]:
        words: list[str] = []
        while at < len(self.text) and self.text[at] not in ends:
            texts, end = self._word(at)
            words += texts
            at = self._blank(max(end, at + 1), between)
        return words, at

    def _word(self, at: int) -> tuple[list[str], int]:
        """Return a word's texts, and its end: one text, none of an empty array, several of a longer one."""
        pieces, several, at = self._pieces(_PIECE, at)
        if self.text[at : at + 1] == "'":
            raise self._error(at, "' is not closed")
        text = "".join(pieces)
        return several if several is not None else [UNKNOWN if UNKNOWN in text else text], at

    def _pieces(self, pattern: re.Pattern[str], at: int) -> tuple[list[str], list[str] | None, int]:
        """Return the texts of pieces in a row, the words of an array `"${NAME[@]}"` among them, and their end."""
        pieces, several = list[str](), None
        while (found := pattern.match(self.text, at)) is not None:
            kind, at, start = str(found.lastgroup), found.end(), found.start()
            text = found[kind]
            if kind == "array":
                text, several = "", self.found.arrays.get(found[kind], [UNKNOWN])
            elif kind == "expansion":
                text, at = self._expansion(start)
            elif kind == "double":
                inside, several, at = self._pieces(_QUOTED, at)
                if self.text[at : at + 1] != '"':
                    raise self._error(start, '" is not closed')
                text, at = "".join(inside), at + 1
            elif kind == "escaped":
                text = text.replace("\n", "")
            pieces.append(text)
        return pieces, several, at

    def _expansion(self, at: int) -> tuple[str, int]:
        """Return the value of what begins with a dollar or a backquote, and where it ends."""
        if name := _NAME.match(self.text, at + 1) if self.text[at] == "$" else None:
            return self.found.variables.get(name[0], UNKNOWN), name.end()
        following = self.text[at + 1 : at + 2]
        if self.text[at] == "`":
            return UNKNOWN, self._close(at, "`") + 1
        if following == "{":
            end = self._brace(at + 2)
            name = _NAME.match(self.text, at + 2)
            if name and name.end() == end:
                return self.found.variables.get(name[0], UNKNOWN), end + 1
            if name and self.text.startswith(":-", name.end()):
                inside = _Reader(self.text[name.end() + 2 : end], self.name)
                inside.found = self.found
                return self.found.variables.get(name[0]) or "".join(inside._word(0)[0]), end + 1
            return UNKNOWN, end + 1
        if following == "(":
            depth, end = 0, at + 1
            while end < len(self.text):
                depth += {"(": 1, ")": -1}.get(self.text[end], 0)
                end += 1
                if not depth:
                    return UNKNOWN, end
            raise self._error(at, "$( is not closed")
        return "$", at + 1

    def _brace(self, at: int, start: int | None = None) -> int:
        """Return where a `${` ends whose text begins at ``start``; at ``at``, no other is open in it."""
        start, end = at if start is None else start, _BRACED.match(self.text, at).end()  # type: ignore[union-attr]
        if self.text.startswith("${", end):
            return self._brace(self._brace(end + 2) + 1, start)
        if self.text[end : end + 1] != "}":
            raise self._error(start, "${ is not closed")
        return end

    def _close(self, at: int, quote: str) -> int:
        end = self.text.find(quote, at + 1)
        if end < 0:
            raise self._error(at, f"{quote} is not closed")
        return end

    def _error(self, at: int, what: str) -> RecipeError:
        line = self.text.count("\n", 0, at) + 1
        return RecipeError(f"{self.name}:{line}: {what}: close it")


class Nodes(NamedTuple):
    """``where``: the file, and its words for it; None where it does not say."""

    where: str
    nodes: int | None
    gpus: int | None


def nodes_of(written: Written, script: Script) -> list[Nodes]:
    """Return what trains first, then what starts it. Raises RecipeError, one line, for a file that does not start."""
    sizes = [_whole(script.variables.get(name)) for name in ("NODES", "GPUS_PER_NODE")]
    found = [Nodes("train.sh: NODES, GPUS_PER_NODE", *sizes)] if any(sizes) else []
    return [*found, *_started(written)]


def _started(written: Written) -> Iterator[Nodes]:
    if text := written.files.get("launch.sbatch"):
        options = (rf"^#SBATCH\s.*--{name}[ =](\S+)" for name in ("nodes", "gpus-per-node"))
        found = [re.search(option, text, re.MULTILINE) for option in options]
        said = [_whole(one and one[1]) for one in found]
        yield Nodes("launch.sbatch: --nodes, --gpus-per-node", *said)
    if (text := written.files.get("hostfile")) is not None:
        slots = _slots(text)
        yield Nodes("hostfile: lines, slots", len(slots), next(iter(slots.values())))
    elif text := written.files.get("launch.sh"):
        gpus = re.search(r"--num_gpus[ =](\d+)", text)
        yield Nodes("launch.sh: --num_gpus", 1, int(gpus[1]) if gpus else None)
    if written.job is not None:
        yield from _of_a_job(written.job)


def _slots(text: str) -> dict[str, int]:
    """GPUs of each host of a hostfile. Raises RecipeError for one that DeepSpeed's launcher does not read."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (words := line.partition("#")[0].strip()):
            continue
        said = re.fullmatch(r"(\S+)\s+slots=([1-9][0-9]*)", words, re.ASCII)
        if said is None:
            raise RecipeError(f"hostfile:{number}: {words!r} is no host: write NAME slots=GPUS")
        if said[1] in found:
            raise RecipeError(f"hostfile:{number}: {said[1]} is there twice: name each host once")
        found[said[1]] = int(said[2])
    if len({*found.values()}) != 1:
        raise RecipeError("hostfile: give hosts, all with the same slots: stages are divided evenly")
    return found


def _of_a_job(job: Any) -> Iterator[Nodes]:
    """Yield the nodes and GPUs of a PyTorchJob, then the GPU limit of each container.

    The limits of its pods have to hold its processes. Raises RecipeError for a job without roles, and for an entry that
    is no whole number.
    """
    roles = _at(job, "spec", "pytorchReplicaSpecs")
    if not isinstance(roles, dict):
        raise RecipeError("job.yaml: spec.pytorchReplicaSpecs has no roles: keep what `evenpipe recipe` wrote")
    replicas = 0
    for role, said in roles.items():
        count = _at(said, "replicas")
        if count is not None and _whole(count) is None:
            raise RecipeError(f"job.yaml: {role}: replicas: {count!r} is no whole number: give one")
        replicas += 1 if count is None else int(count)
    yield Nodes("job.yaml: replicas, nprocPerNode", replicas, _whole(_at(job, "spec", "nprocPerNode")))
    for role, said in roles.items():
        containers = _at(said, "template", "spec", "containers")
        for container in containers if isinstance(containers, list) else []:
            limit = _at(container, "resources", "limits", "nvidia.com/gpu")
            if limit is not None and _whole(limit) is None:
                raise RecipeError(f"job.yaml: {role}: nvidia.com/gpu: {limit!r} is no whole number: give one")
            yield Nodes(f"job.yaml: {role}'s nvidia.com/gpu", None, _whole(limit))


def _at(document: Any, *keys: str) -> Any:
    """Return what stands there; None where nothing does."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _whole(text: object) -> int | None:
    return int(str(text)) if text is not None and str(text).isdecimal() else None
