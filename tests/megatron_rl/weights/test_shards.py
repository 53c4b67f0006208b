import json
import math
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from megatron_rl.config import ParallelConfig
from megatron_rl.model.spec import read_model_spec
from megatron_rl.weights.shards import Kind, hf_shapes, is_first_replica, rank_shards
from tests.support.trainers.tiny_megatron_models import FAMILIES, config_of, one_by_one

FIXTURES = sorted((Path(__file__).parents[2] / "data").glob("te_names_*.json"))
PARTITIONS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3), (4, 1)]
"""(tensor, pipeline); with 4 tensor-parallel ranks, two share each of the 2 key/value heads."""


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    root = tmp_path_factory.mktemp("configs")
    for family in FAMILIES:
        config_of(family).save_pretrained(root / family)
    return {family: read_model_spec(root / family) for family in FAMILIES}


def all_ranks(spec, tensor, pipeline, **kwargs):
    """Shards of each (pipeline, tensor) rank."""
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
    return {
        (p, t): rank_shards(spec, parallel, tensor_rank=t, pipeline_rank=p, **kwargs)
        for p in range(pipeline)
        for t in range(tensor)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_names_every_tensor_of_hugging_face_with_its_shape(specs, family):
    import torch

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family))
    expected = {name: tuple(one.shape) for name, one in one_by_one(dict(model.named_parameters())).items()}
    assert hf_shapes(specs[family]) == expected


@pytest.mark.parametrize(("tensor", "pipeline"), PARTITIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_owned_shards_tile_every_tensor_exactly_once(specs, family, tensor, pipeline):
    counts = {name: np.zeros(shape, int) for name, shape in hf_shapes(specs[family]).items()}
    for shards in all_ranks(specs[family], tensor, pipeline).values():
        for shard in shards:
            counts[shard.hf_name][shard.hf_slices] += shard.owned
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize(("tensor", "expert", "data"), [(1, 2, 2), (2, 4, 8)])
def test_experts_on_several_ranks_are_tiled_once_by_the_first_replicas(specs, tensor, expert, data):
    spec, parallel = specs["qwen3_moe"], ParallelConfig(tensor=tensor, data=data, expert=expert)
    counts = {name: np.zeros(shape, int) for name, shape in hf_shapes(spec).items()}
    for t in range(tensor):
        for d in range(data):
            for shard in rank_shards(spec, parallel, tensor_rank=t, pipeline_rank=0, data_rank=d):
                first = is_first_replica(shard, parallel, d)
                counts[shard.hf_name][shard.hf_slices] += shard.owned and first
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize(("tensor", "pipeline"), PARTITIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_of_a_rank_tile_its_parameters(specs, family, tensor, pipeline):
    for shards in all_ranks(specs[family], tensor, pipeline).values():
        sizes, counts = {}, {}
        for shard in shards:
            end = tuple(s.stop for s in shard.megatron_slices)
            sizes[shard.megatron_name] = np.maximum(sizes.get(shard.megatron_name, 0), end)
        for shard in shards:
            count = counts.setdefault(shard.megatron_name, np.zeros(sizes[shard.megatron_name], int))
            count[shard.megatron_slices] += 1
        assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_fused_qkv_equals_a_loop_over_query_groups(specs, family, tensor):
    spec = specs[family]
    rng = np.random.default_rng(0)
    hf = {
        part: rng.random((heads * spec.head_dim, spec.hidden_size))
        for part, heads in {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}.items()
    }
    per_group = spec.num_heads // spec.num_kv_heads
    fused = []
    for group in range(spec.num_kv_heads):
        for head in range(group * per_group, (group + 1) * per_group):
            fused.append(hf["q"][head * spec.head_dim : (head + 1) * spec.head_dim])
        for part in "kv":
            fused.append(hf[part][group * spec.head_dim : (group + 1) * spec.head_dim])
    fused = np.concatenate(fused)
    for (_, rank), shards in all_ranks(spec, tensor, 1).items():
        found = np.zeros((len(fused) // tensor, spec.hidden_size))
        for shard in shards:
            if shard.megatron_name == "decoder.layers.1.self_attention.linear_qkv.weight":
                found[shard.megatron_slices] = hf[shard.hf_name.split(".")[4][0]][shard.hf_slices]
        np.testing.assert_array_equal(found, np.split(fused, tensor)[rank])


def test_gate_lies_over_up_in_each_rank(specs):
    spec = specs["llama"]
    half = spec.ffn_size // 2
    for (_, rank), shards in all_ranks(spec, 2, 1).items():
        boxes = {
            p.hf_name.split(".")[4]: (p.hf_start[0], p.megatron_start[0], p.shape[0])
            for p in shards
            if p.megatron_name == "decoder.layers.0.mlp.linear_fc1.weight"
        }
        assert boxes == {"gate_proj": (rank * half, 0, half), "up_proj": (rank * half, half, half)}


def test_layer_numbers_are_global_outside_and_local_inside(specs):
    ranks = all_ranks(specs["llama"], 1, 2)
    names = [[(p.hf_name, p.megatron_name) for p in ranks[stage, 0] if "down_proj" in p.hf_name] for stage in range(2)]
    hf, local = "model.layers.{}.mlp.down_proj.weight", "decoder.layers.{}.mlp.linear_fc2.weight"
    assert names == [
        [(hf.format(0), local.format(0)), (hf.format(1), local.format(1))],
        [(hf.format(2), local.format(0))],
    ]


def test_only_matrices_of_layers_are_linear(specs):
    for shard in all_ranks(specs["qwen2_tied"], 1, 1)[0, 0]:
        is_layer_matrix = shard.hf_name.startswith("model.layers.") and len(shard.shape) == 2
        assert (shard.kind is Kind.LINEAR) == is_layer_matrix


def test_the_last_stage_holds_an_unowned_copy_of_a_tied_embedding(specs):
    first, last = all_ranks(specs["qwen3_tied"], 1, 2).values()
    ((owner,), (copy,)) = ([p for p in stage if p.hf_name == "model.embed_tokens.weight"] for stage in (first, last))
    assert (owner.megatron_name, owner.owned) == ("embedding.word_embeddings.weight", True)
    assert (copy.megatron_name, copy.owned) == ("output_layer.weight", False)


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.stem)
def test_transformer_engine_names_and_sizes_equal_the_fixture(tmp_path, fixture):
    """`padded` names parameters whose last rows are vocabulary padding, which no shard fills."""
    data = json.loads(fixture.read_text())
    (tmp_path / "config.json").write_text(json.dumps(data["config"]))
    spec = read_model_spec(tmp_path)
    parallel = ParallelConfig(tensor=data["tensor"], pipeline=data["pipeline"])
    for rank in data["ranks"]:
        shards = rank_shards(
            spec,
            parallel,
            tensor_rank=rank["tensor_rank"],
            pipeline_rank=rank["pipeline_rank"],
            uses_te_layer_names=True,
        )
        sizes = {}
        for shard in shards:
            name = shard.megatron_name
            sizes[name] = sizes.get(name, 0) + math.prod(shard.shape)
        padding = {name: rows * spec.hidden_size for name, rows in rank["padding_rows"].items()}
        expected = {name: math.prod(shape) - padding.get(name, 0) for name, shape in rank["parameters"].items()}
        assert sizes == expected


def test_there_is_a_transformer_engine_fixture_for_each_family():
    families = {json.loads(path.read_text())["config"]["model_type"] for path in FIXTURES}
    assert families == {"llama", "qwen2", "qwen3", "qwen3_moe"}
