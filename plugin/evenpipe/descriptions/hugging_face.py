"""Models as Hugging Face's ``config.json`` describes them, read without transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from evenpipe.descriptions.catalog import described, read_text
from evenpipe.descriptions.kinds import DescriptionError, Model
from evenpipe.wording.nearest import nearest

__all__ = ["configured", "model_types"]


_FILE: Final = "config.json"
#: The keys of a size, by the name that `Model` has for it.
_SIZES: Final = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
    "max_positions": "max_position_embeddings",
    "ffn": "intermediate_size",
    "key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
#: Sizes that `Model` can fill in.
_OPTIONAL: Final = ("num_key_value_heads", "head_dim", "n_inner")
_OF_LATENT: Final = {
    "query_rank": "q_lora_rank",
    "key_value_rank": "kv_lora_rank",
    "plain_dim": "qk_nope_head_dim",
    "rotary_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
_COUNTS: Final = ("n_routed_experts", "num_local_experts", "num_experts")
_CHOSEN: Final = ("num_experts_per_tok", "experts_per_token")
_DROPOUTS: Final = (
    *("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_dropout"),
)


class _Family(NamedTuple):
    """An entry of ``data/families/hugging_face.yaml``, which says what its fields are."""

    fixed: Mapping[str, Any] = {}
    sizes: Mapping[str, str] = _SIZES
    experts: bool = False
    latent: bool = False
    left_out: Sequence[str] = ()


@cache
def _families() -> Mapping[str, _Family]:
    """Return all families by their ``model_type``."""
    file = files("evenpipe.descriptions") / "data" / "families" / "hugging_face.yaml"
    found: dict[str, _Family] = {}
    for name, said in yaml.safe_load(file.read_text(encoding="utf-8")).items():
        like = found[said.pop("like")] if "like" in said else _Family()
        found[name] = like._replace(**{**said, "fixed": {**like.fixed, **said.get("fixed", {})}})
    return found


_BIASED: Final = "biases of queries, keys and values"
_TOKENS: Final = 4096  # of a sequence, where nobody says how many
_LARGEST: Final = 10**7  # of any size


def model_types() -> list[str]:
    """Return the ``model_type`` of all configurations that can be read."""
    return list(_families())


def configured(path: Path, tokens: int | None = None) -> Model:
    """Return the model of a configuration, or of a folder with a ``config.json``, for sequences of so many tokens.

    Without ``tokens`` these are 4,096, or as many as it has positions. Of a model of text and images it is the text's.
    Raises DescriptionError, one line with the file and the key.
    """
    file = path / _FILE if path.is_dir() else path
    config = _Config(_parsed(file), str(file))
    beside: tuple[str, ...] = ()
    if str(config("model_type")) not in _families() and isinstance(config("text_config"), dict):
        config, beside = _Config(config("text_config"), f"{file}: text_config"), ("all but the text model",)
    kind = config.needed("model_type")
    family = _families().get(str(kind))
    if family is None:
        known = nearest(str(kind), model_types())
        raise config.wrong("model_type", f"cannot be read, {known}; or describe it in YAML, for --model")
    sizes = {name: config.size(key, key in _OPTIONAL) for name, key in family.sizes.items()}
    positions = sizes.pop("max_positions")
    said: dict[str, Any] = {
        **family.fixed,
        **sizes,
        **_switches(config, family.fixed),
        "max_positions": 0 if family.fixed.get("positions") else positions,
        "window": _window(config),
        "chunk": config.size("attention_chunk_size", optional=True, least=0),
        "mtp_layers": config.size("num_nextn_predict_layers", optional=True, least=0),
        "sequence": min(_TOKENS, positions),
        "sources": {"all": str(file)},
    }
    if family.experts:
        said["experts"] = _experts(config, sizes["layers"], sizes["ffn"])
    if family.latent:
        said |= _latent(config)
    of_experts = {"experts.count": config.one_of(_COUNTS), "experts.chosen": config.one_of(_CHOSEN)}
    found = described(Model, _name(file), said, str(file), {**family.sizes, **of_experts})
    found = found if tokens is None else found.of_sequence(tokens)
    return found.model_copy(update={"left_out": (*beside, *family.left_out, *_left_out(config, found))})


class _Config:
    """The values of a configuration by key; a null is the same as no key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def __call__(self, key: str, default: Any = None) -> Any:
        found = self._values.get(key)
        return default if found is None else found

    def needed(self, key: str) -> Any:
        if (found := self(key)) is None:
            raise DescriptionError(f"{self.where}: has no {key}: add it")
        return found

    def wrong(self, key: str, what: str) -> DescriptionError:
        return DescriptionError(f"{self.where}: {key}: {self(key)!r:.40} {what}")

    def size(self, key: str, optional: bool = False, least: int = 1) -> int:
        """Return a whole number; 0 where an optional one is missing."""
        if optional and self(key) is None:
            return 0
        found = self.needed(key)
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= _LARGEST:
            raise self.wrong(key, f"is no whole number from {least} to {_LARGEST:,}: correct it")
        return found

    def first(self, keys: tuple[str, ...]) -> int:
        """Return the size that one of the keys has."""
        return self.size(self.one_of(keys))

    def one_of(self, keys: tuple[str, ...]) -> str:
        """Return the key that there is."""
        return next((key for key in keys if self(key) is not None), keys[0])

    def items(self, key: str) -> list[Any]:
        """Return a list; an empty one where it is missing."""
        found = self(key, [])
        if not isinstance(found, list):
            raise self.wrong(key, "is no list: correct it")
        return found

    def switch(self, key: str, default: bool) -> bool:
        found = self(key, default)
        if not isinstance(found, bool):
            raise self.wrong(key, "is neither true nor false: correct it")
        return found


def _parsed(file: Path) -> Mapping[str, Any]:
    text = read_text(file, f"a {_FILE} of Hugging Face, or a folder with one, as `hf download` makes it")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DescriptionError(f"{file}: is no JSON ({error}): name a {_FILE}") from None
    except RecursionError:
        raise DescriptionError(f"{file}: is nested too deeply: name a {_FILE}") from None
    if not isinstance(found, dict):
        raise DescriptionError(f"{file}: is no JSON object: name a {_FILE}")
    return found


def _name(file: Path) -> str:
    """Return the repository's name within the Hub's cache (``models--OWNER--NAME``), or the folder's or the file's."""
    cached = [part for part in file.absolute().parts if part.startswith("models--")]
    if cached:
        return cached[-1].split("--")[-1]
    return (file.absolute().parent.name if file.name == _FILE else file.stem) or "model"


def _switches(config: _Config, fixed: Mapping[str, Any]) -> dict[str, bool]:
    dropouts = [config(key) for key in _DROPOUTS if config(key) is not None]
    everywhere = config.switch("attention_bias", False) and config.switch("mlp_bias", False)
    return {
        "tied": config.switch("tie_word_embeddings", fixed.get("tied", True)),
        "dropout": any(dropouts) if dropouts else fixed.get("dropout", True),
        "biases": fixed.get("biases", True) or everywhere,
        "qk_norm": config.switch("use_qk_norm", fixed.get("qk_norm", False)),
    }


def _window(config: _Config) -> int:
    """Return the window of every second layer, if that is how the layers are."""
    kinds = config.items("layer_types")
    alternate = len(set(kinds[:2])) > 1 and all(kind == kinds[n % 2] for n, kind in enumerate(kinds))
    return config.size("sliding_window", optional=True, least=0) if alternate else 0


def _experts(config: _Config, layers: int, ffn: int) -> dict[str, Any]:
    """``mlp_only_layers`` and ``decoder_sparse_step`` are Qwen's, ``first_k_dense_replace`` is DeepSeek's and GLM's.

    Llama 4 has ``interleave_moe_layer_step``, an inner size of experts of its own, and an expert that all tokens take.
    """
    llama4 = config("intermediate_size_mlp") is not None
    inner = config.size("moe_intermediate_size", optional=True) or (config.size("intermediate_size") if llama4 else ffn)
    shared = config.size("shared_expert_intermediate_size", optional=True, least=0)
    dense = config.size("first_k_dense_replace", optional=True, least=0)
    step = config.size("interleave_moe_layer_step" if llama4 else "decoder_sparse_step", optional=True) or 1
    without = config.items("mlp_only_layers")
    return {
        "count": config.first(_COUNTS),
        "chosen": config.first(_CHOSEN),
        "ffn": inner,
        "shared_ffn": shared or inner * (llama4 or config.size("n_shared_experts", optional=True, least=0)),
        "groups": config.size("n_group", optional=True) or 1,
        "chosen_groups": config.size("topk_group", optional=True) or 1,
        "layers": [n >= dense and n not in without and (n + 1) % step == 0 for n in range(layers)],
    }


def _latent(config: _Config) -> dict[str, Any]:
    sizes = {name: config.size(key, optional=name == "query_rank") for name, key in _OF_LATENT.items()}
    return {"latent": sizes, "head_dim": sizes["value_dim"], "key_value_heads": 0}


def _left_out(config: _Config, model: Model) -> Iterator[str]:
    """Raise DescriptionError for layers without attention of the usual kind."""
    kinds = config.items("layer_types")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention", *["chunked_attention"] * bool(model.chunk)):
            raise DescriptionError(f"{config.where}: layer_types: has {kind!r}, which the planner does not describe")
    for key, what in (("attention_bias", _BIASED), ("mlp_bias", "biases of the MLP")):
        if config.switch(key, False) and not model.biases:
            yield what
    window = config.size("sliding_window", optional=True, least=0)
    used = "sliding_attention" in kinds if kinds else config.switch("use_sliding_window", True)
    if used and not model.window and 0 < window < model.sequence:
        yield f"sliding windows of {window:,} tokens (all attention is estimated in full)"
