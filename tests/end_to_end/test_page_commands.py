"""Every command of `evenpipe` in docs/ runs, or goes as far as a file that only the reader has.

The tutorial's are run by `test_tutorial.py`.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from evenpipe.cli.main import main
from evenpipe.megatron_lm.flags import add_flags, config_from
from tests.end_to_end.test_readme import MODEL
from tests.readme import ROOT, commands

PAGES = [f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "tutorial"]
#: Files of the reader's own, of which a page's other commands make none.
YOURS = re.compile(
    r"CHECKPOINTS|RECIPE|PLAN\.json|T\.json|COSTS\.json|(ds_)?config\.json|model\.py:build|.*/Qwen3-30B-A3B|"
    r"(path/to/)?pretrain_gpt\.py"
)
#: These measure, train or search for long; `report` shows what they have made.
LONG = ("train", "partition", "candidates", "report")
#: A model for the layout that a page checks, which ends in a predictor of further tokens.
DEEP = ("--num-layers", "61", "--mtp-num-layers", "1", "--pipeline-model-parallel-size", "16")
#: Megatron's own flags beside EvenPipe's.
MEGATRON = {"--num-virtual-stages-per-pipeline-rank", "--overlap-moe-expert-parallel-comm"}
MEGATRON |= {"--pipeline-model-parallel-size"}


def _given(words: list[str]) -> list[str]:
    """The words with a reader's flags, without what is in brackets, and without what a shell does."""
    text = re.sub(r" \[[^]]*\]| >.*", "", "\0".join(words).replace("\0[", "\0 [").replace("\0", " \0"))
    plain = [word.strip() for word in text.split("\0") if word.strip()]
    model = (*MODEL, "--global-batch-size", "64", *(DEEP if "--check" in words else ()))
    return [flag for word in plain for flag in (model if word.startswith("<") else (word,))]


def _starting(*first: str) -> list[Any]:
    found = [(page, words) for page in PAGES for words in commands(page) if words[0] in first]
    marks = {True: [pytest.mark.long], False: []}
    return [
        pytest.param(page, words, marks=marks[words[1] in LONG], id=f"{page[5:-3]}: {' '.join(words[1:6])}")
        for page, words in found
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each page one, where its commands find what those before them have written."""
    return {page: tmp_path_factory.mktemp(Path(page).stem) for page in PAGES}


@pytest.mark.parametrize(("page", "words"), _starting("evenpipe"))
def test_a_command_of_a_page(page, words, folders, monkeypatch, capsys):
    monkeypatch.chdir(folders[page])
    given = _given(words[1:])
    yours = [word for word in given if YOURS.fullmatch(word) and given[given.index(word) - 1] != "--out"]
    try:
        status = main(given)
    except SystemExit as ended:
        status = ended.code or 0
    printed = capsys.readouterr()
    if yours and status:
        assert status == 2
        assert any(Path(word.partition(":")[0]).name in printed.err for word in yours), printed.err
    else:
        checks = words[1] == "doctor" or "--check" in words  # that it finds something is no failure
        assert status in ((0, 1) if checks else (0,)), printed.err


@pytest.mark.parametrize(("page", "words"), _starting("torchrun"))
def test_flags_that_a_page_adds_to_a_script(page, words, tmp_path, monkeypatch):
    if "pretrain_gpt.py" not in words:
        assert "doctor" in words
        return
    monkeypatch.chdir(tmp_path)
    main(["schedule", "--schedule", "1f1b", "--stages", "4", "--micro-batches", "8", "--out", "S.txt"])
    added = [word for word in words[words.index("pretrain_gpt.py") + 1 :] if not word.startswith("<")]
    args, others = add_flags(ArgumentParser(add_help=False, allow_abbrev=False)).parse_known_args(added)
    assert config_from(args, []).active
    if "<your flags>" in words:  # a whole line is run by tests/megatron_lm/test_readme.py
        assert {word for word in others if word.startswith("-")} <= MEGATRON
