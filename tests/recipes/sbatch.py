"""The lines that sbatch reads its options from, by the grammar of its own reader.

Slurm's `src/sbatch/opt.c`: options end at the first line that is no comment; words are split at white space, grouped by
either quote, a backslash takes what follows it literally (in quotes of both kinds too), and `#` begins a comment.
"""

from __future__ import annotations

__all__ = ["OPTIONS", "directives"]

#: Those that recipes use, and whether they take a value (sbatch(1)).
OPTIONS = {
    **dict.fromkeys(("job-name", "partition", "account", "time", "nodes", "ntasks-per-node", "gpus-per-node"), True),
    "output": True,
    "exclusive": False,
}
_PREFIX = "#SBATCH"


def directives(script: str) -> dict[str, str | None]:
    """Options by name. Raises ValueError for a line that sbatch would not take."""
    found: dict[str, str | None] = {}
    for line in script.split("\n")[1:]:
        if line and not line.startswith("#"):
            break
        if not line.startswith(_PREFIX):
            continue
        for word in _words(line.removeprefix(_PREFIX)):
            name, sign, value = word.removeprefix("--").partition("=")
            if not word.startswith("--") or name not in OPTIONS or OPTIONS[name] != bool(sign):
                raise ValueError(f"no option of sbatch: {word}")
            found[name] = value if sign else None
    return found


def _words(line: str) -> list[str]:
    words: list[str] = []
    word, quote, escaped, inside = "", "", False, False
    for character in line:
        if escaped:
            word, escaped = word + character, False
        elif character == "\\":
            escaped = inside = True
        elif quote:
            word, quote = (word, "") if character == quote else (word + character, quote)
        elif character in "\"'":
            quote, inside = character, True
        elif character == "#":
            break
        elif character in " \t\n\v\f\r":
            words += [word] * inside
            word, inside = "", False
        else:
            word, inside = word + character, True
    return words + [word] * inside
