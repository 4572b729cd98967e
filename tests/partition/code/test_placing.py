"""A model without values gets those of files, and buffers that are in none as its modules make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenpipe.stage_code import StageCodeError, State
from evenpipe.stage_code.loading import place

CPU = torch.device("cpu")


def put(model: nn.Module, state: State | None) -> None:
    place(list(model.modules()), model, CPU, state)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("LlamaForCausalLM", {"num_key_value_heads": 2}),
        ("BertForMaskedLM", {}),
    ],
)
def test_models_of_hugging_faces_from_their_own_files(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    """Llama's rotary frequencies and BERT's positions are buffers that are not saved."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name.replace("ForCausalLM", "Config").replace("ForMaskedLM", "Config"))(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, **fields
    )
    whole = getattr(transformers, name)(config).eval()
    whole.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.device("meta"):
        empty = getattr(transformers, name)(config).eval()
    put(empty, tmp_path)
    ids = torch.arange(16).view(2, 8)
    assert torch.equal(empty(input_ids=ids, labels=ids).loss, whole(input_ids=ids, labels=ids).loss)


class Buffered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("scale", torch.ones(4), persistent=False)


def test_what_has_no_values_is_named(tmp_path: Path) -> None:
    state = Buffered().state_dict()
    with torch.device("meta"):
        empty = Buffered()
    with pytest.raises(StageCodeError, match=r"^scale: is on the meta device, and has no values: give state="):
        put(empty, state)
    (tmp_path / "index.json").write_text("{}")
    (tmp_path / "damaged.safetensors").write_bytes(b"no")
    for given, said in {
        "none": "none/?.*: .*: state= names a file of safetensors",
        "index.json": "is no index of safetensors files",
        "damaged.safetensors": "no safetensors: ",
    }.items():
        with pytest.raises(StageCodeError, match=said):
            put(Buffered(), tmp_path / given)
    with pytest.raises(StageCodeError, match=r"state: has 'weight' of \(2, 4\), and the model's is \(4, 4\)"):
        put(Buffered(), {"weight": torch.zeros(2, 4), "bias": torch.zeros(4)})
