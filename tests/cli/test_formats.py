"""The schemas of docs/schemas are the code's, and every key that a command prints is in them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from evenpipe.cli.formats import FORMATS, schema
from evenpipe.cli.main import main

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
SIZES = ("--stages", "2", "--micro-batches", "4")
GPT = ("--model", "gpt3-13b", "--cluster", "1x8-a100-80gb", "--global-batch-size", "32")
TRAIN = ("--layers", "2", "--hidden", "16", "--heads", "2", "--seq-length", "16", "--iterations", "2")
LINE = (
    *("torchrun", "--nproc-per-node", "4", "pretrain_gpt.py", "--num-layers", "8", "--hidden-size", "1024", "--bf16"),
    *(
        "--num-attention-heads",
        "8",
        "--seq-length",
        "1024",
        "--max-position-embeddings",
        "1024",
        "--vocab-size",
        "50257",
    ),
    *("--micro-batch-size", "1", "--global-batch-size", "16", "--pipeline-model-parallel-size", "4"),
)
PRINTED = {
    "schedule": ("schedule", "--schedule", "1f1b", *SIZES),
    "simulation": ("simulate", "--schedule", "1f1b", *SIZES, "--one-queue"),
    "estimate": ("estimate", *GPT),
    "plan": ("plan", *GPT, "--stages", "2", "--schedule", "1f1b", "--top", "1"),
    "run": ("train", "--engine", "module", *SIZES, *TRAIN),
    "fit": ("fit", "--cluster", "1x4-h100", "--keep", "t,p,c,e,b,v,optimizer,gradients,moments,placement", "--", *LINE),
    "layout": ("partition", "--megatron", "--device", "h100", "--", *LINE[4:]),
    "layout-check": (
        *("partition", "--megatron", "--cluster", "1x8-h100", "--check", "Ett|ttt|ttt|L"),
        *("--", *LINE[4:]),
    ),
    "recipe": (
        "recipe",
        "gpt",
        *GPT,
        "--framework",
        "megatron",
        "--launcher",
        "torchrun",
        "--stages",
        "2",
        "--out",
        "DIR",
    ),
    "patches": ("patches",),
    "doctor": ("doctor",),
}


def unknown(document: Any, described: dict[str, Any], all_of: dict[str, Any], path: str = "") -> Iterator[str]:
    """The places of keys that the schema does not have."""
    if "$ref" in described:
        described = all_of["$defs"][described["$ref"].rpartition("/")[2]]
    if "anyOf" in described and document is not None:
        each = [list(unknown(document, one, all_of, path)) for one in described["anyOf"] if one.get("type") != "null"]
        yield from min(each, key=len)
    elif isinstance(document, dict) and "properties" in described:
        for key, value in document.items():
            if key in described["properties"]:
                yield from unknown(value, described["properties"][key], all_of, f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(document, list):
        items = described.get("prefixItems") or [described.get("items", {})] * len(document)
        for value, one in zip(document, items, strict=True):
            yield from unknown(value, one, all_of, f"{path}[]")


@pytest.mark.parametrize("name", FORMATS)
def test_the_page_s_schema_is_the_code_s(name):
    made = json.dumps(schema(name), indent=1, sort_keys=True) + "\n"
    assert (SCHEMAS / f"{name}.json").read_text() == made, "python -m evenpipe.cli.formats docs/schemas"


def test_there_are_no_others():
    assert {path.stem for path in SCHEMAS.iterdir()} == set(FORMATS)


#: Which read Megatron's flags in a process of 3 s, as `layout` does.
READ_AGAIN = ("layout-check",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.gate] if name in READ_AGAIN else []) for name in PRINTED]
)
def test_what_a_command_prints_is_described(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, *words = PRINTED[name]
    status = main([command, "--json", *words])
    assert not status or name in ("doctor", "patches")  # whose status tells that something was found
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == f"evenpipe.{name}/1"
    TypeAdapter(FORMATS[name]).validate_python(document)
    assert set(unknown(document, schema(name), schema(name))) == set()


def test_an_error_is_described(capsys):
    with pytest.raises(SystemExit):
        main(["schedule", "--schedule", "nothing", *SIZES, "--json"])
    document = json.loads(capsys.readouterr().out)
    TypeAdapter(FORMATS["error"]).validate_python(document)
    assert set(document) == set(schema("error")["properties"])


def test_a_key_that_is_not_described_is_noticed():
    described = schema("front")
    point = {"name": "1f1b", "peak_bytes": 1, "batch_ms": 1.0}
    document = {"format": "evenpipe.front/1", "limit_ms": 1.0, "base_bytes": 1, "known": [point | {"new": 1}], "x": 0}
    assert set(unknown(document, described, described)) == {".known[].new", ".x"}


def test_they_are_written_anew(tmp_path):
    subprocess.run([sys.executable, "-W", "ignore", "-m", "evenpipe.cli.formats", tmp_path], check=True)
    assert {path.stem for path in tmp_path.iterdir()} == set(FORMATS)
