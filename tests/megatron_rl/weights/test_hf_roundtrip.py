import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config import ParallelConfig
from tests.support.byte_tokenizer import CHAT_TEMPLATE, write_byte_tokenizer
from tests.support.trainers.rank_functions import build_loaded
from tests.support.trainers.tiny_megatron_models import FAMILIES, save_model

PARTITIONS = [
    ParallelConfig(),
    ParallelConfig(tensor=2),
    ParallelConfig(pipeline=3),
    ParallelConfig(tensor=2, pipeline=2),
    ParallelConfig(tensor=2, data=2),
]


def load_and_export(position, parallel, source, destination, dtype, max_shard_bytes):
    from megatron_rl.weights.hf_export import export

    model = build_loaded(position, parallel, source, dtype=dtype)
    export(model, parallel, position, source=source, destination=destination, max_shard_bytes=max_shard_bytes)
    return (destination / "config.json").exists()


def tensors_of(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_bitwise_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parallel", PARTITIONS, ids=lambda p: f"tp{p.tensor}_pp{p.pipeline}_dp{p.data}")
def test_hugging_face_to_megatron_and_back_is_bitwise(ranks, tmp_path, family, parallel):
    source = save_model(family, tmp_path / "source")
    done = ranks.run(load_and_export, source, tmp_path / "copy", "fp32", 1 << 30, parallel=parallel)
    assert all(done)
    assert_bitwise_equal(tensors_of(tmp_path / "copy"), tensors_of(source))


@pytest.mark.parametrize("parallel", [ParallelConfig(data=2, expert=2), ParallelConfig(tensor=2, data=2, expert=2)])
def test_experts_on_several_ranks_round_trip_bitwise(ranks, tmp_path, parallel):
    source = save_model("qwen3_moe", tmp_path / "source")
    ranks.run(load_and_export, source, tmp_path / "copy", "fp32", 1 << 30, parallel=parallel)
    assert_bitwise_equal(tensors_of(tmp_path / "copy"), tensors_of(source))


def test_sharded_bf16_files_round_trip_and_load_in_transformers(ranks, tmp_path):
    from transformers import AutoModelForCausalLM

    source = save_model("qwen2_tied", tmp_path / "source", dtype=torch.bfloat16, max_shard_size="60KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    (source / "tokenizer.json").write_text("{}")
    ranks.run(load_and_export, source, tmp_path / "copy", "bf16", 60_000, parallel=ParallelConfig(tensor=2, pipeline=2))
    copy = tmp_path / "copy"
    assert_bitwise_equal(tensors_of(copy), tensors_of(source))
    assert len(list(copy.glob("model-*-of-*.safetensors"))) > 2
    assert (copy / "tokenizer.json").read_text() == "{}"
    assert json.loads((copy / "config.json").read_text())["dtype"] == "bfloat16"
    model, original = (AutoModelForCausalLM.from_pretrained(path) for path in (copy, source))
    assert model.dtype is torch.bfloat16
    ids = torch.arange(9)[None]
    assert torch.equal(model(ids).logits, original(ids).logits)


def test_an_export_has_every_chat_template(ranks, tmp_path):
    """`transformers` saves all but the one named `default` in a folder of their own."""
    from transformers import AutoTokenizer

    source = save_model("llama", tmp_path / "source")
    templates = {"default": CHAT_TEMPLATE, "tool_use": "tools: {{ tools }}", "rag": "{{ documents }}"}
    write_byte_tokenizer(tmp_path / "tokenizer", chat_template=templates)
    (tmp_path / "tokenizer" / "config.json").unlink()
    shutil.copytree(tmp_path / "tokenizer", source, dirs_exist_ok=True)
    ranks.run(load_and_export, source, tmp_path / "copy", "fp32", 1 << 30)
    assert AutoTokenizer.from_pretrained(tmp_path / "copy").chat_template == templates


def test_an_export_has_the_dtype_of_the_trainer(ranks, tmp_path):
    source = save_model("llama", tmp_path / "source")
    ranks.run(load_and_export, source, tmp_path / "copy", "bf16", 1 << 30, parallel=ParallelConfig(tensor=2))
    expected = {name: tensor.bfloat16() for name, tensor in tensors_of(source).items()}
    assert_bitwise_equal(tensors_of(tmp_path / "copy"), expected)
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_existing_directory_is_refused_on_every_rank(ranks, tmp_path):
    source = save_model("llama", tmp_path / "source")
    with pytest.raises(RuntimeError, match="does not overwrite") as refused:
        ranks.run(load_and_export, source, source, "fp32", 1 << 30, parallel=ParallelConfig(tensor=2))
    assert str(refused.value).count("source exists;") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "unexpected: extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"of another shape: model.norm.weight is \[3\]"),
    ],
)
def test_a_directory_of_another_model_is_refused_naming_the_tensor(ranks, tmp_path, change, message):
    source = save_model("llama", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(RuntimeError, match=message):
        ranks.run(load_only, source)


def load_only(position, parallel, source):
    build_loaded(position, parallel, source)


def test_a_copy_of_a_tied_embedding_is_ignored_and_an_output_layer_of_another_shape_is_refused(ranks, tmp_path):
    source = save_model("qwen2_tied", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    copy = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": copy}, source / "model.safetensors")
    ranks.run(load_only, source)
    save_file({**tensors, "lm_head.weight": torch.zeros(3, 3)}, source / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"of another shape: lm_head.weight is \[3, 3\]"):
        ranks.run(load_only, source)
