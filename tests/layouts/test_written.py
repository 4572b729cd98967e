"""A plan that was written is read again, and refused where it does not fit a run."""

from argparse import Namespace

import pytest

from evenpipe.layouts.gpt import LayoutError, Pipeline
from evenpipe.layouts.written import WrittenLayout
from tests.layouts.written_plan import FLAGS, write_plan


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_plan(tmp_path_factory.mktemp("plan") / "P.json")


def test_it_says_what_it_is_for_and_what_was_predicted(path):
    plan = WrittenLayout.read(path)
    assert plan.layout.count("t") == 8
    assert plan.pipeline == Pipeline(2, 1, 8)
    assert plan.schedule == "1f1b"
    assert [stage.forward_ms + stage.backward_ms > 0 and stage.peak_bytes > 0 for stage in plan.stages] == [True, True]
    assert plan.difference(Namespace(**FLAGS)) is None


def test_replicas_batches_and_an_unknown_vocabulary_are_no_difference(path):
    plan = WrittenLayout.read(path)
    other = FLAGS | {"global_batch_size": 32, "use_distributed_optimizer": True, "vocab_size": None}
    assert plan.difference(Namespace(**other)) is None
    assert plan.other_vocabulary(plan.shape.vocabulary) is None
    assert "the plan is for padded --vocab-size 8064, not 128" in plan.other_vocabulary(128)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_layers": 12}, "the plan is for --num-layers 8, not 12: "),
        ({"hidden_size": 128}, "the plan is for --hidden-size 64, not 128: "),
        ({"num_attention_heads": 8}, "--num-attention-heads 4, not 8: "),
        ({"seq_length": 128}, "--seq-length 64, not 128: "),
        ({"vocab_size": 100}, "padded --vocab-size 8064, not 128: "),
        ({"num_experts": 8}, "--num-experts 4, not 8: "),
        ({"moe_layer_freq": 2}, "layers of experts by --moe-layer-freq 11111111, not 10101010: "),
        ({"mtp_num_layers": None}, "--mtp-num-layers 1, not 0: "),
        ({"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size 1, not 2: "),
        ({"pipeline_model_parallel_size": 4}, "--pipeline-model-parallel-size 2, not 4: "),
        ({"micro_batch_size": 2}, "--micro-batch-size 1, not 2: "),
        ({"bf16": True}, "precision fp32, not bf16: "),
        ({"swiglu": True, "ffn_hidden_size": 256}, "--swiglu off, not on: "),
        ({"recompute_granularity": "full"}, "--recompute-granularity none, not full: "),
        ({"pipeline_model_parallel_layout": "Et*8|mL"}, "--pipeline-model-parallel-layout lays the layers out too: "),
        ({"num_layers_per_virtual_pipeline_stage": 2}, "leave --num-layers-per-virtual-pipeline-stage out"),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "leave --num-virtual-stages-per-pipeline-rank out"),
        ({"multi_latent_attention": True}, "--multi-latent-attention: "),
    ],
)
def test_what_differs_is_named(path, other, message):
    difference = WrittenLayout.read(path).difference(Namespace(**FLAGS | other))
    assert message in difference
    assert "\n" not in difference


def test_half_layers_on_virtual_stages_are_refused(tmp_path):
    path = write_plan(tmp_path / "P.json", chunks=2)
    assert WrittenLayout.read(path).difference(Namespace(**FLAGS)) is None
    path.write_text(path.read_text()[:-1] + ', "halves": [1]}')
    assert "in half on virtual stages" in WrittenLayout.read(path).difference(Namespace(**FLAGS))


def test_another_file_is_refused_in_one_line(path, tmp_path):
    other = tmp_path / "other.json"
    for text, message in (
        ('{"format": "evenpipe.plan/1"}', "no layout that `evenpipe partition --megatron --out` wrote: format: "),
        ("no JSON", "no layout that .* wrote: document: is no JSON"),
        (path.read_text().replace('"heads"', '"heds"'), r"wrote: shape.heads: is missing"),
    ):
        other.write_text(text)
        with pytest.raises(LayoutError, match=message) as raised:
            WrittenLayout.read(other)
        assert "\n" not in str(raised.value)
    with pytest.raises(LayoutError, match=r"nowhere.json: cannot be read: No such file"):
        WrittenLayout.read(tmp_path / "nowhere.json")


def test_a_configuration_is_compared_as_far_as_it_goes(path):
    plan = WrittenLayout.read(path)
    config = Namespace(
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
        ffn_hidden_size=256,
        gated_linear_unit=False,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        sequence_parallel=False,
        mtp_num_layers=1,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=256,
        moe_shared_expert_intermediate_size=None,
        moe_layer_freq=1,
    )
    assert plan.unlike(config) is None
    others = {"ffn_hidden_size": (256, 512), "mtp_num_layers": (1, None), "num_moe_experts": (4, 8)}
    for name, (planned, other) in others.items():
        different = Namespace(**{**vars(config), name: other})
        assert plan.unlike(different).startswith(f"the plan is for {name} {planned}, not {str(other).lower()}: ")
    config.moe_layer_freq = [0, 1] * 4
    assert plan.unlike(config).startswith("the plan is for moe_layer_freq 11111111, not ")
