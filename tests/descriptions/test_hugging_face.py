"""Configurations of Hugging Face: as many parameters as published, and as transformers' models have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.descriptions import DescriptionError, Model, configured, model, model_types
from evenpipe.planner.operations.parts import Blocks, parts_of
from evenpipe.planner.run import Run
from evenpipe.planner.stage_bytes import parameters_of


def sized(
    model_type: str, layers: int, hidden: int, heads: int, ffn: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        **more,
    }


EIGHT = {"num_key_value_heads": 8}
QWEN3 = {"head_dim": 128, "use_sliding_window": False, "sliding_window": 4096}
QWEN3_MOE = {**QWEN3, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK = {**LATENT, "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_shared_experts": 1}
GLM = {
    "n_routed_experts": 160,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    "attention_bias": True,
    "use_qk_norm": True,
}
#: Of the text model alone; Scout's are the defaults of transformers' configuration.
LLAMA4 = sized("llama4_text", 48, 5120, 40, 8192, 202048, **EIGHT, head_dim=128) | {
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
}
#: Sizes as in the config.json of each repository on huggingface.co, and 10^9 parameters as its card or report has them.
PUBLISHED = {
    "meta-llama/Meta-Llama-3-8B": (sized("llama", 32, 4096, 32, 14336, 128256, **EIGHT), 8.03),
    "meta-llama/Meta-Llama-3-70B": (sized("llama", 80, 8192, 64, 28672, 128256, **EIGHT), 70.55),
    "Qwen/Qwen3-8B": (sized("qwen3", 36, 4096, 32, 12288, 151936, **QWEN3, **EIGHT), 8.2),
    "Qwen/Qwen3-30B-A3B": (
        sized("qwen3_moe", 48, 2048, 32, 6144, 151936, **QWEN3_MOE, moe_intermediate_size=768),
        30.5,
    ),
    "Qwen/Qwen3-235B-A22B": (
        sized("qwen3_moe", 94, 4096, 64, 12288, 151936, **QWEN3_MOE, moe_intermediate_size=1536),
        235,
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        sized("mixtral", 32, 4096, 32, 14336, 32000, **EIGHT, num_local_experts=8, num_experts_per_tok=2),
        46.7,
    ),
    "deepseek-ai/DeepSeek-V3": (
        sized(
            "deepseek_v3",
            61,
            7168,
            128,
            18432,
            129280,
            **DEEPSEEK,
            n_routed_experts=256,
            first_k_dense_replace=3,
            n_group=8,
            topk_group=4,
            num_nextn_predict_layers=1,
        ),
        671,
    ),
    "moonshotai/Kimi-K2-Base": (
        sized("kimi_k2", 61, 7168, 64, 18432, 163840, **DEEPSEEK, n_routed_experts=384, first_k_dense_replace=1),
        1040,
    ),
    "moonshotai/Moonlight-16B-A3B": (
        sized(
            "deepseek_v3",
            27,
            2048,
            16,
            11264,
            163840,
            **{**DEEPSEEK, "q_lora_rank": None, "moe_intermediate_size": 1408, "num_experts_per_tok": 6},
            n_routed_experts=64,
            first_k_dense_replace=1,
        )
        | {"n_shared_experts": 2},
        15.96,
    ),
    "zai-org/GLM-4.5": (
        sized("glm4_moe", 92, 5120, 96, 12288, 151552, **GLM, **EIGHT, head_dim=128, first_k_dense_replace=3),
        355,
    ),
    "meta-llama/Llama-4-Scout-17B-16E": (LLAMA4, 109),
    "meta-llama/Llama-4-Maverick-17B-128E": (
        {**LLAMA4, "num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False},
        400,
    ),
    "nvidia/Nemotron-4-340B-Base": (sized("nemotron", 96, 18432, 96, 73728, 256000, **EIGHT, head_dim=192), 341),
}


def written(folder: Path, config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parameters(of: Model) -> float:
    """Without the layers that predict further tokens, which transformers does not build."""
    of, run = of.model_copy(update={"mtp_layers": 0}), Run(global_batch=1, precision="fp16", attention="flash")
    return sum(parameters_of(part, Blocks(of, run)).all for part in parts_of(of, run))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_that_they_are_known_for(name: str, tmp_path: Path) -> None:
    config, billions = PUBLISHED[name]
    found = configured(written(tmp_path / name, config))
    assert found.name == name.split("/")[1]
    assert parameters(found) / 1e9 == pytest.approx(billions, rel=0.015)


@pytest.mark.parametrize(
    ("name", "described"),
    {
        "Meta-Llama-3-8B": "llama3-8b",
        "Meta-Llama-3-70B": "llama3-70b",
        "Qwen3-8B": "qwen3-8b",
        "Qwen3-30B-A3B": "qwen3-30b-a3b",
        "Qwen3-235B-A22B": "qwen3-235b-a22b",
        "Mixtral-8x7B-v0.1": "mixtral-8x7b",
        "DeepSeek-V3": "deepseek-v3",
        "Kimi-K2-Base": "kimi-k2",
        "Moonlight-16B-A3B": "moonlight-16b-a3b",
        "GLM-4.5": "glm-4.5",
        "Nemotron-4-340B-Base": "nemotron-4-340b",
        "Llama-4-Scout-17B-16E": "llama4-scout",
        "Llama-4-Maverick-17B-128E": "llama4-maverick",
    }.items(),
)
def test_a_configuration_is_the_model_that_the_package_describes(name: str, described: str, tmp_path: Path) -> None:
    config = next(config for repository, (config, _) in PUBLISHED.items() if repository.endswith(f"/{name}"))
    of = model(described)
    found = configured(written(tmp_path, config), of.sequence)
    assert [found.expert_layers(n, n + 1) for n in range(of.layers)] == [
        of.expert_layers(n, n + 1) for n in range(of.layers)
    ]
    same = {"name", "sources", "experts", "left_out"}
    assert found.model_dump(exclude=same) == of.model_dump(exclude=same)
    if of.experts and found.experts:
        placed = {"layers", "dense_layers", "step"}
        assert found.experts.model_dump(exclude=placed) == of.experts.model_dump(exclude=placed)
    assert set(of.left_out) == set(found.left_out)


#: Where the configuration that transformers makes of nothing is no model.
COMPLETED: dict[str, dict[str, Any]] = {
    "nemotron": EIGHT,
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "kimi_k2": {},
}


@pytest.mark.parametrize("kind", model_types())
def test_each_family_has_the_parameters_that_transformers_builds(kind: str, tmp_path: Path) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model({"kimi_k2": "deepseek_v3"}.get(kind, kind), **COMPLETED.get(kind, {}))
    config.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    built = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        count = sum(one.numel() for one in built.from_config(config).parameters())
    found = configured(written(tmp_path, {**said, "model_type": kind}))
    said.pop("tie_word_embeddings", None)
    assert configured(written(tmp_path, {**said, "model_type": kind})).tied is config.tie_word_embeddings
    assert parameters(found) == pytest.approx(count, rel=1e-4 if kind != "bert" else 1e-3)


@given(
    layers=st.integers(1, 6),
    dense=st.integers(0, 3),
    step=st.integers(1, 3),
    alone=st.sets(st.integers(0, 5)),
    tied=st.booleans(),
)
@settings(max_examples=15)
def test_which_layers_have_experts_is_as_transformers_has_it(
    layers: int, dense: int, step: int, alone: set[int], tied: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    for kind, more in {
        "qwen3_moe": {"decoder_sparse_step": step, "mlp_only_layers": sorted(alone)},
        "deepseek_v3": {"first_k_dense_replace": dense},
        "llama4_text": {"interleave_moe_layer_step": step},
    }.items():
        config = transformers.AutoConfig.for_model(kind, num_hidden_layers=layers, tie_word_embeddings=tied, **more)
        folder = tmp_path_factory.mktemp(kind)
        config.save_pretrained(folder)
        with torch.device("meta"):
            count = sum(one.numel() for one in transformers.AutoModelForCausalLM.from_config(config).parameters())
        assert parameters(configured(folder)) == pytest.approx(count, rel=1e-4)


LLAMA = PUBLISHED["meta-llama/Meta-Llama-3-8B"][0]


def test_a_file_a_folder_and_a_snapshot_of_the_hub_s_cache_are_read_and_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "b968826d", LLAMA)
    assert configured(folder).name == configured(folder / "config.json").name == "Qwen3-8B"
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(LLAMA))
    assert configured(mine).name == "mine"


def test_of_a_model_of_text_and_images_the_text_s_is_read(tmp_path: Path) -> None:
    alone = configured(written(tmp_path, LLAMA))
    config = {"model_type": "mistral3", "text_config": LLAMA, "vision_config": {"hidden_size": 1}}
    found = configured(written(tmp_path, config))
    assert found.left_out == ("all but the text model",)
    assert found.model_copy(update={"left_out": ()}) == alone
    with pytest.raises(DescriptionError, match=r"config\.json: text_config: has no vocab_size: add it"):
        configured(written(tmp_path, {**config, "text_config": {**LLAMA, "vocab_size": None}}))


def test_a_sequence_is_asked_for_or_of_4096_tokens(tmp_path: Path) -> None:
    folder = written(tmp_path, LLAMA)
    assert configured(folder).sequence == 4096
    assert configured(folder, 32768).sequence == 32768
    short = written(tmp_path, {**LLAMA, "max_position_embeddings": 2048})
    assert configured(short).sequence == 2048


@pytest.mark.parametrize(
    ("more", "tokens", "said"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 8192, ["sliding windows of 4,096 tokens"]),
        ({"model_type": "mistral", "sliding_window": 4096}, 4096, []),
        ({"use_sliding_window": False, "sliding_window": 4096}, 8192, []),
        ({"layer_types": ["full_attention"] * 32, "sliding_window": 128}, 4096, []),
        ({"layer_types": ["sliding_attention"] * 32, "sliding_window": 128}, 4096, ["sliding windows of 128 tokens"]),
        ({"attention_bias": True}, 4096, ["biases of queries, keys and values"]),
        ({"attention_bias": True, "mlp_bias": True}, 4096, []),
        ({"layer_types": ["sliding_attention", "full_attention"] * 16, "sliding_window": 128}, 4096, []),
    ],
)
def test_what_is_not_described_is_told(more: dict[str, Any], tokens: int, said: list[str], tmp_path: Path) -> None:
    left_out = configured(written(tmp_path, {**LLAMA, **more}), tokens).left_out
    assert len(left_out) == len(said)
    assert all(one.startswith(words) for one, words in zip(left_out, said, strict=True))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**LLAMA, "model_type": "qwen3_mo"}, "model_type: 'qwen3_mo' cannot be read, did you mean qwen3_moe?"),
        ({**LLAMA, "model_type": "zzz"}, "model_type: 'zzz' cannot be read, choose one of llama, mistral,"),
        ({**LLAMA, "model_type": None}, "has no model_type: add it"),
        ({**LLAMA, "hidden_size": None}, "has no hidden_size: add it"),
        ({**LLAMA, "hidden_size": "4096"}, "hidden_size: '4096' is no whole number from 1 to 10,000,000"),
        ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers: True is no whole number"),
        ({**LLAMA, "hidden_size": 4097}, "hidden_size=4097 does not divide by num_attention_heads=32"),
        ({**LLAMA, "layer_types": ["linear_attention"]}, "layer_types: has 'linear_attention', which the planner does"),
        ({**LLAMA, "layer_types": 3}, "layer_types: 3 is no list"),
        ({**LLAMA, "tie_word_embeddings": "no"}, "tie_word_embeddings: 'no' is neither true nor false"),
        ({**LLAMA, "model_type": "deepseek_v3"}, "has no n_routed_experts: add it"),
        ([LLAMA], "is no JSON object: name a config.json"),
    ],
)
def test_what_is_wrong_is_told_with_its_file_and_key(config: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(DescriptionError) as caught:
        configured(written(tmp_path, config))
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert said in str(caught.value)


VALUES = st.none() | st.booleans() | st.integers(-3, 9) | st.text(max_size=3) | st.lists(st.integers(0, 3), max_size=2)


@given(name=st.sampled_from(sorted(PUBLISHED)), data=st.data())
def test_whatever_a_key_has_is_a_model_or_one_line(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = PUBLISHED[name][0]
    keys = st.sampled_from([*config, "layer_types", "mlp_only_layers", "sliding_window", "attention_dropout"])
    folder = written(tmp_path_factory.mktemp("any"), {**config, **data.draw(st.dictionaries(keys, VALUES, max_size=3))})
    line = str(folder)
    try:
        configured(folder)
    except DescriptionError as error:
        line = str(error)
    assert line.startswith(str(folder))
    assert "\n" not in line


def test_what_is_no_file_or_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=r"Qwen/Qwen3-8B: No such file or directory: name a config\.json"):
        configured(Path("Qwen/Qwen3-8B"))
    with pytest.raises(DescriptionError, match=r"config\.json: No such file"):
        configured(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DescriptionError, match=r"config\.json: is no JSON \("):
        configured(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(DescriptionError, match=r"config\.json: is nested too deeply"):
        configured(tmp_path)
