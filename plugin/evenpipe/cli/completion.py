"""``evenpipe --completion SHELL``: the script that completes commands, options and choices, made from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from shlex import quote
from typing import Final, NamedTuple

from evenpipe.cli.parser import COMMANDS, Parser

__all__ = ["SHELLS", "completion"]


class _Option(NamedTuple):
    """An option's main name, what the help says of it, and its choices; ``None``: a file or free text, "": a switch."""

    name: str
    about: str
    choices: str | None


def _options(command: str) -> list[_Option]:
    commands = Parser("evenpipe").add_subparsers()
    import_module(f"evenpipe.cli.{command}").add_to(commands)
    return [
        _Option(name, about, "" if one.nargs == 0 else None if choices is None else " ".join(map(str, choices)))
        for one in commands.choices[command].options()
        for choices in [one.choices or getattr(one.type, "known", None)]
        for about in [(one.help or "").replace("%(default)s", str(one.default)).partition(" (")[0]]
        for name in [next((name for name in one.option_strings if name.startswith("--")), one.option_strings[0])]
    ]


def _bash(commands: Mapping[str, list[_Option]]) -> Iterator[str]:
    """A function with a case for each command; the word before decides whether a value is completed."""
    yield "_evenpipe() {"
    yield "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words="
    yield '    if [ "$COMP_CWORD" -eq 1 ]; then'
    yield f'        COMPREPLY=($(compgen -W "{" ".join(commands)} --version --help" -- "$word")); return'
    yield "    fi"
    yield '    case "${COMP_WORDS[1]} $before" in'
    for command, options in commands.items():
        for one in options:
            if one.choices != "":
                words = f'compgen -W "{one.choices}"' if one.choices else "compgen -f"
                yield f'        "{command} {one.name}") COMPREPLY=($({words} -- "$word")); return;;'
    yield "    esac"
    yield '    case "${COMP_WORDS[1]}" in'
    for command, options in commands.items():
        yield f'        {command}) words="{" ".join(one.name for one in options)}";;'
    yield "    esac"
    yield '    case "$word" in'
    yield '        -*) COMPREPLY=($(compgen -W "$words" -- "$word"));;'
    yield '        *) COMPREPLY=($(compgen -f -- "$word"));;'
    yield "    esac"
    yield "}"
    yield "complete -o filenames -F _evenpipe evenpipe"


def _zsh(commands: Mapping[str, list[_Option]]) -> Iterator[str]:
    """Bash's script, which zsh runs: one list to keep right in place of two."""
    yield "#compdef evenpipe"
    yield "autoload -Uz bashcompinit && bashcompinit"
    yield from _bash(commands)


def _fish(commands: Mapping[str, list[_Option]]) -> Iterator[str]:
    """A line for each command and each option, with what it does."""
    for name in ("version", "help"):
        yield f"complete -c evenpipe -n __fish_use_subcommand -l {name}"
    for command in commands:
        yield f"complete -c evenpipe -n __fish_use_subcommand -f -a {command} -d {quote(COMMANDS[command])}"
    for command, options in commands.items():
        for one in options:
            value = "" if one.choices == "" else f" -x -a {quote(one.choices)}" if one.choices else " -r"
            about = f" -d {quote(one.about)}" if one.about and one.about != argparse.SUPPRESS else ""
            yield f"complete -c evenpipe -n '__fish_seen_subcommand_from {command}' -l {one.name[2:]}{value}{about}"


SHELLS: Final[Mapping[str, Callable[[Mapping[str, list[_Option]]], Iterator[str]]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}


def completion(shell: str) -> str:
    """Return the script for one of ``SHELLS``."""
    return "\n".join(SHELLS[shell]({command: _options(command) for command in COMMANDS})) + "\n"
