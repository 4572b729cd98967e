"""Models by name, from a user's file, and from a configuration of Hugging Face's."""

from __future__ import annotations

import json

import pytest
import torch

from evenpipe.partition.counting import count
from evenpipe.partition.models import ModelError, build, described, from_config, from_function
from evenpipe.partition.trace import trace, weightless

GIB = 1e9


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("bert-large", 336.2),
        ("gpt2-large", 774.0),
        ("t5-large", 737.7),
        ("t5-v1.1-large", 783.2),
        ("amoebanet-d", 28.0),
    ],
)
def test_parameters_are_as_published(name, millions):
    with weightless():
        model = build(name, 1).model

    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize(
    ("name", "micro_batch_size", "attention", "gigabytes"),
    [
        ("bert-large", 16, "eager", 28.96),
        pytest.param("bert-large", 16, "sdpa", 14.88, marks=pytest.mark.long),
        pytest.param("gpt2-large", 4, "eager", 17.99, marks=pytest.mark.long),
        pytest.param("t5-large", 4, "eager", 20.51, marks=pytest.mark.long),
    ],
)
def test_full_size_models_are_counted_without_memory_for_them(name, micro_batch_size, attention, gigabytes):
    with weightless():
        example = build(name, micro_batch_size, attention=attention)
    graph = trace(example.model, example.inputs)

    saved = sum(it.nbytes for it in count(graph, "cuda").storages if it.savers)

    assert saved / GIB == pytest.approx(gigabytes, rel=0.002)


def test_a_users_function_gives_model_and_inputs(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "class Mine(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).sum()\n"
        "def make(micro_batch_size):\n"
        "    rates = [rate.item() for rate in torch.linspace(0, 1, 3)]\n"
        "    return Mine(8, 8), {'x': torch.zeros(micro_batch_size, len(rates), 8)}\n"
    )
    with weightless():
        example = from_function(f"{file}:make", 5)

    assert trace(example.model, example.inputs).micro_batch_size == 5


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("    raise ValueError('no data')", "mine.py:2: ValueError: no data"),
        ("    raise SystemExit(3)", "mine.py:2: SystemExit: 3"),
        ("    return 3", r"should return \(model, inputs\), and returned int"),
        ("    return torch.nn.Linear(2, 2), {}", "with a tensor among them"),
        ("    return torch.nn.Linear(2, 2), {'x': [torch.ones(2)]}", r"inputs\['x'\] is a list of tensors: give every"),
    ],
)
def test_a_function_that_fails_is_told_where(tmp_path, body, says):
    file = tmp_path / "mine.py"
    file.write_text(f"def make():\n{body}\nimport torch\n")

    with pytest.raises(ModelError, match=says) as caught:
        from_function(f"{file}:make")
    assert "\n" not in str(caught.value)


def test_so_is_one_in_a_file_that_is_named_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def make():\n    return {}['data']\n")

    with pytest.raises(ModelError, match=r"^mine\.py:make: mine\.py:2: KeyError: 'data'$"):
        from_function("mine.py:make")


def test_a_function_that_cannot_give_the_size_asked_for_is_told_how(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import torch\ndef make():\n    return torch.nn.Linear(2, 2), {'input': torch.zeros(4, 2)}\n")

    assert from_function(f"{file}:make", 4).inputs["input"].shape == (4, 2)
    with pytest.raises(ModelError, match="its inputs hold 4 samples, not 8: let make take micro_batch_size"):
        from_function(f"{file}:make", 8)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("mine.py", "should read FILE.py:FUNCTION"),
        ("absent.py:make", "there is no file absent.py"),
        (f"{__file__}:absent", "the file has no absent"),
    ],
)
def test_a_function_that_is_not_there_is_refused(where, says):
    with pytest.raises(ModelError, match=says):
        from_function(where)


def test_a_configuration_of_hugging_faces_gives_its_model(tmp_path):
    file = tmp_path / "config.json"
    fields = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    fields |= {"num_key_value_heads": 2, "vocab_size": 64}
    file.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **fields}))

    with weightless():
        example = from_config(file, 2, precision="bf16", sequence_length=8)
    graph = trace(example.model, example.inputs)

    assert next(example.model.parameters()).dtype == torch.bfloat16
    assert len(graph.layer_ends) == 4


def test_a_classifier_has_one_label_a_sample(tmp_path):
    file = tmp_path / "config.json"
    fields = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    architectures = ["BertForSequenceClassification"]
    file.write_text(json.dumps({"model_type": "bert", "architectures": architectures, "vocab_size": 64, **fields}))

    with weightless():
        example = from_config(file, 2, sequence_length=8)

    assert example.inputs["labels"].shape == (2,)
    assert trace(example.model, example.inputs).micro_batch_size == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ("{}", "no 'model_type'"),
        ('{"model_type": "bert"}', "no 'architectures'"),
        ('{"model_type": "bert", "architectures": ["Absent"]}', "has no Absent"),
        ('{"model_type": "bert", "architectures": ["BertModel"]}', "takes no labels"),
    ],
)
def test_a_configuration_that_says_too_little_is_refused_in_one_line(tmp_path, text, says):
    file = tmp_path / "config.json"
    file.write_text(text)

    with weightless(), pytest.raises(ModelError, match=says) as caught:
        from_config(file, 2)
    assert "\n" not in str(caught.value)


def test_without_transformers_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(described.importlib.sys.modules, "transformers", None)

    with pytest.raises(ModelError, match=r"pip install 'evenpipe\[huggingface\]'"):
        build("bert-large", 1)


def test_unknown_names_are_refused():
    with pytest.raises(ModelError, match="no model 'bert': there are bert-large, "):
        build("bert", 1)
    with pytest.raises(ModelError, match="no precision 'int8'"):
        build("bert-large", 1, precision="int8")
