"""What an error says of a name or a value, in words that a user knows."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field, ValidationError

from evenpipe.wording.nearest import nearest
from evenpipe.wording.validation import first_message


def test_the_nearest_name_is_asked_for_and_without_one_all_are_named() -> None:
    assert nearest("pla", ["plan", "simulate"]) == "did you mean plan?"
    assert nearest("xyz", ["plan", "simulate"]) == "choose one of plan, simulate"
    assert nearest("plax", ["plan"], cutoff=0.9) == "choose one of plan"


class Part(BaseModel, extra="forbid"):
    ms: float = Field(ge=0)
    count: int = 1
    names: tuple[str, ...] = ()


class Document(BaseModel):
    parts: tuple[Part, ...]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "the file: is no JSON"),
        ("[]", "the file: must be an object"),
        ("{}", "parts: is missing"),
        ('{"parts": 3}', "parts: must be a list"),
        ('{"parts": [{}]}', "parts.0.ms: is missing"),
        ('{"parts": [{"ms": "x"}]}', "parts.0.ms: must be a number"),
        ('{"parts": [{"ms": -1}]}', "parts.0.ms: must be greater than or equal to 0"),
        ('{"parts": [{"ms": 1, "count": 1.5}]}', "parts.0.count: must be a whole number"),
        ('{"parts": [{"ms": 1, "names": [1]}]}', "parts.0.names.0: must be a text"),
        ('{"parts": [{"ms": 1, "size": 1}]}', "parts.0.size: unknown key"),
    ],
)
def test_what_pydantic_finds_is_said_plainly(text: str, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Document.model_validate_json(text)
    assert first_message(caught.value, "the file") == said
