"""Settings of a program, such as a recipe of Megatron-Bridge, as flags of Megatron-LM, and changed flags as settings.

Bridge keeps them in sections (`ConfigContainer`: model, train, ddp, optimizer, ...); a `TransformerConfig` has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from evenpipe.planner.arguments import FlagError, known_flags
from evenpipe.recipes.surroundings import megatron_flags

__all__ = ["Settings", "field_of", "flags_of", "settings_of"]

_TYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}


def _bridge() -> Mapping[str, Any]:
    found: Mapping[str, Any] = megatron_flags()["bridge"]
    return found


class Settings(NamedTuple):
    """``values`` by the name of the field; ``sections``: whether they were in sections."""

    values: Mapping[str, Any]
    sections: bool


def settings_of(given: Any) -> Settings:
    """Return the settings of a mapping, of a dataclass, or of any object with attributes, in sections or not."""
    outer = _fields(given)
    model = outer.get("model")
    if not isinstance(model, Mapping) and not hasattr(model, "__dict__"):
        return Settings(outer, False)
    found: dict[str, Any] = {}
    for name, only in _bridge()["sections"].items():
        section = outer.get(name)
        if name == "mixed_precision" and isinstance(section, str):
            found |= _precision(section)
        elif section is not None:
            fields = _fields(section).items()
            said = {key: one for key, one in fields if one is not None and (only == "all" or key in only)}
            if "sequence_length" in said:  # of a dataset, which Bridge sets the model's to
                said["seq_length"] = said.pop("sequence_length")
            found |= said
    return Settings(found, True)


def _fields(given: Any) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    named = {one.name for one in dataclasses.fields(given)} if dataclasses.is_dataclass(given) else set()
    return {name: getattr(given, name, None) for name in named} | dict(getattr(given, "__dict__", {}))


def _precision(name: str) -> dict[str, Any]:
    """Return the settings of a precision that Bridge has by name, such as bf16_with_fp8_current_scaling_mixed."""
    found: dict[str, Any] = {"bf16": "bf16" in name, "fp16": "fp16" in name}
    if "nvfp4" in name:
        return found | {"fp4": "e2m1"}
    recipe = next((one for words, one in _bridge()["precisions"].items() if words in name), None)
    return found | ({"fp8": "hybrid", "fp8_recipe": recipe} if recipe else {})


def flags_of(settings: Settings) -> list[str]:
    """Return the flags of Megatron-LM that say the same. Raises FlagError for a value that no flag can say."""
    return [word for flag, *values in _flags(settings.values) for word in (f"--{flag}", *values)]


def _flags(values: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    kinds = {option[2:]: action for option, action in known_flags().items()}
    groups = values.get("num_query_groups")
    if groups is not None and groups != values.get("num_attention_heads"):
        yield ("group-query-attention",)
    inverted = _bridge()["inverted"]
    for name, flag in inverted.items():
        if values.get(name) is False and (name != "grad_reduce_in_fp32" or values.get("bf16")):
            yield (flag,)
    skipped = _without_effect(values)
    for name, value in values.items():
        flag = _bridge()["names"].get(name, name.replace("_", "-"))
        kind = kinds.get(flag)
        if value is None or value is False or kind is None or name in skipped or name in inverted:
            continue
        if kind.nargs == 0:
            yield from [(flag,)] * bool(value)
            continue
        try:
            words = _words(name, value)
        except (TypeError, KeyError, IndexError, ValueError):
            raise FlagError(f"{name}: {value!r}: is no value of --{flag}") from None
        words = [word for word in words if kind.choices is None or word in kind.choices]
        if words:
            yield (flag, *words)


def _without_effect(values: Mapping[str, Any]) -> set[str]:
    """Return the fields whose values have no effect under the other settings, so that no flag is given for them."""
    found = {"group_query_attention"}
    if values.get("pipeline_model_parallel_layout"):
        found.add("virtual_pipeline_model_parallel_size")
    if not values.get("fp8"):
        found |= {"fp8_recipe", "fp8_param", "fp8_param_gather", "fp8_dot_product_attention"}
    if values.get("recompute_granularity") != "selective":
        found.add("recompute_modules")
    if values.get("recompute_granularity") != "full":
        found |= {"recompute_method", "recompute_num_layers"}
    if not values.get("optimizer_cpu_offload"):
        found.add("optimizer_offload_fraction")
    if not values.get("num_moe_experts"):
        found |= {name for name in values if name.startswith("moe_")}
    if not values.get("multi_latent_attention"):
        found |= {"q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"}
    return found


def _words(name: str, value: Any) -> list[str]:
    """Return the words of a value on a command line; none for an object without one."""
    if name == "pipeline_model_parallel_layout":
        return [_layout(value)]
    if name == "attention_backend":
        saved = value.get("_args_", [0])[0] if isinstance(value, Mapping) else getattr(value, "name", value)
        return [_bridge()["attention_backends"][saved] if isinstance(saved, int) else str(saved)]
    if name.startswith("exp_avg"):
        said = value.get("_target_", "") if isinstance(value, Mapping) else str(value)
        said = said.removeprefix("torch.")
        return [_TYPES.get(said, said)]
    if name == "moe_layer_freq" and not isinstance(value, int | str):
        return [str([int(one) for one in value])]
    if name == "window_size" and not isinstance(value, str):
        return [",".join(map(str, value))]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [str(getattr(one, "name", one)) for one in value]
    if isinstance(value, Mapping):
        return []  # an object of Python's, which says no size
    return [str(getattr(value, "value", value))]


def _layout(value: Any) -> str:
    """Return the layout as its flag has it; Bridge's recipes have lists of the kinds of layers."""
    value = getattr(value, "input_data", value)
    if isinstance(value, str):
        return value
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    try:
        return "|".join("".join(letters[str(getattr(kind, "name", kind))] for kind in part) for part in value)
    except (KeyError, TypeError):
        raise FlagError(
            f"pipeline_model_parallel_layout: {value!r}: give lists of embedding, decoder, mtp, loss, or a text"
        ) from None


def field_of(argument: str, value: Any, sections: bool) -> tuple[str, Any]:
    """Return the field that an argument of Megatron-LM's is, with its section if there are any, and its value there."""
    inverted = {flag.replace("-", "_"): name for name, flag in _bridge()["inverted"].items()}
    named = {flag.replace("-", "_"): name for name, flag in _bridge()["names"].items()}
    if argument in inverted:
        argument, value = inverted[argument], not value
    name = named.get(argument, argument)
    section = next((one for one, names in _bridge()["changed"].items() if name in names), "model")
    return (f"{section}.{name}" if sections else name), value
