"""Directories of tiny weights; `tests/launcher/checks/test_bad_input.py` breaks headers."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.weights import weight_files
from megatron_rl.weights.shards import hf_shapes
from megatron_rl.weights.weight_files import (
    INDEX,
    StoredTensor,
    check_shapes,
    check_tied_output,
    directory_tensors,
    file_tensors,
)
from tests.support.model_specs import qwen_spec

TIED = qwen_spec(tied=True)
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def weights(spec):
    torch.manual_seed(0)
    return {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in hf_shapes(spec).items()}


def checked(directory, spec=TIED):
    tensors = directory_tensors(directory)
    check_shapes(tensors, spec, directory)
    check_tied_output(tensors, spec, directory)


def test_a_stored_tensor_names_the_bytes_of_the_tensor(tmp_path):
    path, found = tmp_path / "model.safetensors", {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
    save_file(found, path)
    stored = file_tensors(path)
    assert {name: one.shape for name, one in stored.items()} == {"a": (2, 3), "b": (4,)}
    for name, one in stored.items():
        assert isinstance(one, StoredTensor) and one.dtype == "F32"
        assert path.read_bytes()[one.start : one.start + one.num_bytes] == found[name].numpy().tobytes()


@pytest.mark.parametrize("read_bytes", [1 << 24, 100])
@pytest.mark.parametrize("split", [False, True])
def test_an_output_layer_beside_a_tied_embedding_must_be_its_copy(tmp_path, monkeypatch, read_bytes, split):
    monkeypatch.setattr(weight_files, "_READ_BYTES", read_bytes)
    tensors = weights(TIED)

    def save(output):
        save_file(tensors if split else {**tensors, OUTPUT: output}, tmp_path / "a.safetensors")
        if split:
            save_file({OUTPUT: output}, tmp_path / "b.safetensors")
        return tmp_path

    checked(save(tensors[EMBEDDING].clone()))
    for row in (0, -1):
        other = tensors[EMBEDDING].clone()
        other[row, row] += 1
        with pytest.raises(ValueError, match=r"lm_head.weight .* is no copy of .*; set tie_word_embeddings to false"):
            checked(save(other))
    with pytest.raises(ValueError, match=r"lm_head.weight \(F32\) is no copy of .* \(BF16\)"):
        checked(save(tensors[EMBEDDING].float()))
    with pytest.raises(ValueError, match=r"of another shape: lm_head.weight is \[3, 3\], not \[101, 32\]"):
        checked(save(torch.zeros(3, 3)))


def test_weights_without_a_tied_output_layer_are_not_compared(tmp_path):
    save_file(weights(TIED), tmp_path / "model.safetensors")
    checked(tmp_path)
    untied = qwen_spec()
    save_file(weights(untied), tmp_path / "model.safetensors")
    checked(tmp_path, untied)


def test_a_tensor_in_two_files_is_refused_naming_both(tmp_path):
    tensors = weights(TIED)
    save_file(tensors, tmp_path / "model.safetensors")
    save_file({EMBEDDING: tensors[EMBEDDING]}, tmp_path / "old.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors and old\.safetensors both hold model\.embed"):
        checked(tmp_path)


def test_files_that_the_index_does_not_name_are_not_read_and_those_it_names_share_no_tensor(tmp_path):
    tensors = weights(TIED)
    names = list(tensors)
    files = {name: "a.safetensors" if at < 5 else "b.safetensors" for at, name in enumerate(names)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    for file in ("a.safetensors", "b.safetensors"):
        save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
    save_file(tensors, tmp_path / "model.safetensors")
    checked(tmp_path)
    held = {name: tensors[name] for name in names[5:]} | {names[1]: tensors[names[1]] + 1}
    save_file(held, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors and b\.safetensors both hold "):
        checked(tmp_path)
