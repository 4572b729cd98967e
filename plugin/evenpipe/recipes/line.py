"""The line that starts a script: launcher, script and flags, as they were typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

__all__ = ["Line", "read_line"]

_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=", re.ASCII)
_LAUNCHERS: Final = ("torchrun", "deepspeed")


@dataclass(frozen=True)
class Line:
    """``before``: launcher and its options, up to the script; ``flags``: the script's own."""

    before: tuple[str, ...]
    script: str
    flags: tuple[str, ...]

    @property
    def of_deepspeed(self) -> bool:
        """Return whether the script is one of DeepSpeed, by its flags."""
        return any(word.partition("=")[0] in ("--deepspeed", "--deepspeed_config") for word in self.flags)

    @property
    def by_deepspeed(self) -> bool:
        """Return whether DeepSpeed's launcher starts it."""
        return any(PurePath(word).name == "deepspeed" for word in self.before)

    @property
    def command(self) -> str:
        """The line, for a shell."""
        return " ".join(map(_word, (*self.before, self.script, *self.flags)))

    @property
    def lines(self) -> list[str]:
        """The launcher's words on a line, the script's flags on one each, quoted."""
        found = [" ".join(map(_word, (*self.before, self.script)))]
        for flag in self.flags:
            if flag.startswith("--") or len(found) == 1:
                found.append(f"    {_word(flag)}")
            else:
                found[-1] += f" {_word(flag)}"
        return found

    def by_evenpipe(self) -> Line:
        """Return the line that runs the script through `evenpipe run`."""
        if "evenpipe" in self.before:
            return self
        before = list(self.before)
        if self.by_deepspeed:
            at = next(n for n, word in enumerate(before) if PurePath(word).name == "deepspeed")
            if "--no_local_rank" not in before:
                before.insert(at + 1, "--no_local_rank")
            before += ["--module", "evenpipe", "run"]
        else:
            starts = any(PurePath(word).name in _LAUNCHERS or "python" in PurePath(word).name for word in before)
            before += ["-m", "evenpipe", "run"] if starts else ["python", "-m", "evenpipe", "run"]
        return Line((*before, *["--deepspeed"] * self.of_deepspeed), self.script, self.flags)

    def with_variable(self, name: str, value: str) -> Line:
        """Return the line with a variable of its environment, before the command."""
        return Line((f"{name}={value}", *self.before), self.script, self.flags)

    def variable(self, name: str) -> str | None:
        """Return the value of a variable that the line sets, None where it does not."""
        values = [word.partition("=")[2] for word in self.before if word.startswith(f"{name}=")]
        return values[-1] if values else None


def read_line(words: Sequence[str]) -> Line | None:
    """Return the line, None where it names no script (a file ``….py``, not behind -m)."""
    at = next((n for n, word in enumerate(words) if word.endswith(".py") and (n == 0 or words[n - 1] != "-m")), None)
    return None if at is None else Line(tuple(words[:at]), words[at], tuple(words[at + 1 :]))


def _word(word: str) -> str:
    """Quoted for a shell; an assignment before the command stays one."""
    name = _ASSIGNMENT.match(word)
    return f"{name[0]}{shlex.quote(word[name.end() :])}" if name and word[name.end() :] else shlex.quote(word)
