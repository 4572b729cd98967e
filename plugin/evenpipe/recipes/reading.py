"""Reads a script of a recipe again, without running it: variables, arrays, and what the last command is given.

The part of bash that recipes are written in, and that people edit them with: assignments, arrays, quotes, comments,
`$NAME` and `${NAME:-default}`. What only a shell could tell (`$(…)`) is unknown, and said to be.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from evenpipe.recipes.errors import RecipeError

__all__ = ["UNKNOWN", "Script", "read_script"]

#: Stands for what only a shell could tell.
UNKNOWN: Final = "\0"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNED: Final = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=")


@dataclass
class Script:
    """``command``: the words of the command that starts EvenPipe."""

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)


class _Word(NamedTuple):
    """A word's texts: one, none of an empty array, several of a longer one; ``end``: where it ends."""

    texts: list[str]
    end: int


def read_script(text: str, name: str) -> Script:
    """Raises RecipeError, which names the line, where a quote or an array is not closed, and without a command."""
    return _Reader(text, name).script()


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
        """Reads one command; what is no assignment and does not start EvenPipe is passed over."""
        at = self._blank(at, "\n;&|")
        assigned = _ASSIGNED.match(self.text, at)
        if assigned is not None:
            return self._assignment(assigned[1], assigned.end())
        words: list[str] = []
        while at < len(self.text) and self.text[at] not in "\n;&|()":
            word = self._word(at)
            words += word.texts
            at = self._blank(max(word.end, at + 1))
        if any(words[n : n + 2] == ["evenpipe", "run"] for n in range(len(words))):
            self.found.command = words
        return at + (at < len(self.text) and self.text[at] in "()")

    def _assignment(self, name: str, at: int) -> int:
        if self.text[at : at + 1] != "(":
            word = self._word(at)
            self.found.variables[name] = "".join(word.texts)
            return word.end
        at, words = self._blank(at + 1, "\n"), []
        start = at
        while self.text[at : at + 1] != ")":
            if at >= len(self.text):
                raise self._error(start, f"{name}=( is not closed")
            word = self._word(at)
            words += word.texts
            at = self._blank(max(word.end, at + 1), "\n")
        self.found.arrays[name] = words
        return at + 1

    def _blank(self, at: int, also: str = "") -> int:
        """Past spaces, comments and continued lines."""
        while at < len(self.text):
            if self.text[at] in " \t" + also:
                at += 1
            elif self.text.startswith("\\\n", at):
                at += 2
            elif self.text[at] == "#":
                end = self.text.find("\n", at)
                at = end if end >= 0 else len(self.text)
            else:
                break
        return at

    def _word(self, at: int) -> _Word:
        pieces, several = [""], None
        while at < len(self.text) and self.text[at] not in " \t\n;&|()":
            character = self.text[at]
            if character == "'":
                end = self._close(at, "'")
                pieces.append(self.text[at + 1 : end])
                at = end + 1
            elif character == '"':
                inside, several, at = self._quoted(at)
                pieces += inside
            elif character == "\\":
                pieces.append(self.text[at + 1 : at + 2].replace("\n", ""))
                at += 2
            elif character in "$`":
                value, at = self._expansion(at)
                pieces.append(value)
            else:
                pieces.append(character)
                at += 1
        return _Word([UNKNOWN if UNKNOWN in (text := "".join(pieces)) else text] if several is None else several, at)

    def _quoted(self, at: int) -> tuple[list[str], list[str] | None, int]:
        """Between double quotes: the text, or the words of `"${NAME[@]}"`."""
        start, pieces = at, []
        array = re.compile(r'"\$\{(\w+)\[@\]\}"').match(self.text, at)
        if array is not None:
            return [], self.found.arrays.get(array[1], [UNKNOWN]), array.end()
        at += 1
        while self.text[at : at + 1] != '"':
            if at >= len(self.text):
                raise self._error(start, '" is not closed')
            if self.text[at] == "\\" and self.text[at + 1 : at + 2] in tuple('$`"\\\n'):
                pieces.append(self.text[at + 1].replace("\n", ""))
                at += 2
            elif self.text[at] in "$`":
                value, at = self._expansion(at)
                pieces.append(value)
            else:
                pieces.append(self.text[at])
                at += 1
        return pieces, None, at + 1

    def _expansion(self, at: int) -> tuple[str, int]:
        """The value of what begins with a dollar or a backquote, and where it ends."""
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
                return self.found.variables.get(name[0]) or "".join(inside._word(0).texts), end + 1
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

    def _brace(self, at: int) -> int:
        """Where `${` ends."""
        start, quote = at, ""
        while at < len(self.text):
            character = self.text[at]
            if quote:
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            elif character == "}":
                return at
            elif self.text.startswith("${", at):
                at = self._brace(at + 2)
            at += 1
        raise self._error(start, "${ is not closed")

    def _close(self, at: int, quote: str) -> int:
        end = self.text.find(quote, at + 1)
        if end < 0:
            raise self._error(at, f"{quote} is not closed")
        return end

    def _error(self, at: int, what: str) -> RecipeError:
        line = self.text.count("\n", 0, at) + 1
        return RecipeError(f"{self.name}:{line}: {what}: close it")
