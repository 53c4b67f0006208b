"""FP8 products and FP8 parameters on one CUDA device, against BF16 from the same weights; a process of its own."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.batching.sft_batch import SftBatch
from megatron_rl.config import AlgorithmConfig, ParallelConfig
from megatron_rl.quantization import fp8_parameters
from megatron_rl.quantization.fp8 import block_amax, fp8_block_codes, fp8_scale
from megatron_rl.weights.fp8_passthrough import blocks_agree
from rollout.data.sft_rows import SftRows
from rollout.types import WeightVersion
from rollout.weights.format import LAYOUTS
from tests.megatron_rl.trainer.test_trainer import assembled, trainer_spec
from tests.support.trainers.memory_sender import MemorySender
from tests.support.trainers.saves import save
from tests.support.trainers.tiny_megatron_models import VOCAB, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a CUDA device of compute capability 9.0",
    ),
]

GENERATOR = np.random.default_rng(0)
ROWS = SftRows(
    prompts=tuple(GENERATOR.integers(1, VOCAB, n).astype(np.int32) for n in (9, 17, 30, 4)),
    responses=tuple(GENERATOR.integers(1, VOCAB, n).astype(np.int32) for n in (40, 33, 50, 61)),
)
BATCH = SftBatch(micro_batches=(((0, 1), (2, 3)),), num_tokens=184)
PROBE = list(range(1, 13))


def trainer_of(position, directory, fp8, *, format="fp8_block", **optimizer):
    from megatron_rl.trainer.trainer import Trainer

    spec = trainer_spec(directory, ParallelConfig(), AlgorithmConfig(), format=format, distributed=True, **optimizer)
    return Trainer(replace(spec, config=spec.config.model_copy(update={"dtype": "bf16", "fp8": fp8})), position)


def losses(trainer, *, steps=2):
    return [trainer.sft_step(BATCH, ROWS).metrics["sft/loss"] for _ in range(steps)]


def primaries(trainer):
    """FP8 parameters by name."""
    return {name: one for name, one in trainer._model.named_parameters() if fp8_parameters.is_fp8_parameter(one)}


def masters(trainer):
    """FP32 masters of the FP8 parameters, in their shape."""
    return {name: one.main_param.detach().view(one.shape).clone() for name, one in primaries(trainer).items()}


def codes_of(weight):
    """Codes and inverse scales by the rule that a CPU test compares with a naive one."""
    scale = fp8_scale(block_amax(weight), power_of_two=True, dtype=torch.bfloat16)
    return fp8_block_codes(weight, scale).view(torch.uint8), 1.0 / scale


def contents(trainer):
    """Copies of all tensors of FP8 parameters."""
    return [part.clone() for one in primaries(trainer).values() for part in fp8_parameters.buffers(one)]


def same(found, expected):
    """Whether all tensors have the same bytes; the padding of scales may be any NaN."""
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) or torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("family", ["blocks", "wide"])
def test_a_step_in_fp8_has_nearly_the_loss_of_a_step_in_bf16(single_rank, tmp_path, family):
    directory = save_model(family, tmp_path / "model", dtype=torch.bfloat16)
    found = {fp8: losses(trainer_of(single_rank, directory, fp8)) for fp8 in ("none", "blockwise", "blockwise_param")}
    for first, second in found.values():
        assert first == pytest.approx(found["none"][0], rel=0.05)
        assert second < first
    assert found["blockwise"][0] == pytest.approx(found["blockwise_param"][0], rel=1e-3), "the same codes"


@pytest.mark.parametrize("family", ["blocks", "wide"])
def test_masters_equal_the_loaded_weights_and_codes_are_those_of_the_masters(single_rank, tmp_path, family):
    directory = save_model(family, tmp_path / "model", dtype=torch.bfloat16)
    loaded = dict(trainer_of(single_rank, directory, "none")._model.named_parameters())
    trainer = trainer_of(single_rank, directory, "blockwise_param")
    assert len(primaries(trainer)) == 4 * 2
    for name, master in masters(trainer).items():
        assert torch.equal(master, loaded[name].detach().float()), name
        blocks, (codes, inverse) = fp8_parameters.Blocks.of(primaries(trainer)[name]), codes_of(loaded[name].detach())
        assert torch.equal(blocks.codes.view(torch.uint8), codes), name
        assert torch.equal(blocks.inverse, inverse), name
        assert primaries(trainer)[name].get_high_precision_init_val() is None, "kept on the host for nothing"


@pytest.mark.parametrize("family", ["blocks", "wide"])
def test_a_step_changes_parameters_to_the_codes_of_their_masters_in_both_orientations(single_rank, tmp_path, family):
    trainer = trainer_of(single_rank, save_model(family, tmp_path / "model", dtype=torch.bfloat16), "blockwise_param")
    before = {name: one._rowwise_data.clone() for name, one in primaries(trainer).items()}
    losses(trainer, steps=1)
    for name, master in masters(trainer).items():
        parameter = primaries(trainer)[name]
        blocks, (codes, inverse) = fp8_parameters.Blocks.of(parameter), codes_of(master.to(torch.bfloat16))
        assert not torch.equal(parameter._rowwise_data, before[name]), name
        assert torch.equal(blocks.codes.view(torch.uint8), codes) and torch.equal(blocks.inverse, inverse), name
        assert torch.equal(fp8_parameters.decoded(parameter), parameter.dequantize()), name
        assert torch.equal(parameter._columnwise_data, parameter._rowwise_data.t()), name
        rows, columns = inverse.shape
        assert torch.equal(parameter._columnwise_scale_inv[:columns, :rows], inverse.t()), name


@pytest.mark.parametrize(("family", "share"), [("blocks", 1.0), ("wide", None)])
def test_published_codes_are_the_parameters_codes_where_blocks_agree(single_rank, tmp_path, family, share):
    from megatron_rl.weights.quantization_stats import code_metrics

    trainer = trainer_of(single_rank, save_model(family, tmp_path / "model", dtype=torch.bfloat16), "blockwise_param")
    losses(trainer, steps=1)
    sender = MemorySender()
    trainer.plan_publishes(())
    staged = trainer.stage(WeightVersion(1), sender)
    sent = assembled([(None, sender.contents, None, trainer.publishes.plan)])
    agreed = []
    for one in trainer._held:
        parameter = primaries(trainer).get(one.megatron_name)
        if parameter is None:
            continue
        agrees = blocks_agree(one, tuple(parameter.shape))
        agreed.append(agrees)
        if agrees:
            codes = parameter._rowwise_data[one.megatron_slices].cpu().numpy()
            touched = LAYOUTS["fp8_block"].touched(one.hf_start, one.shape)
            scales = fp8_parameters.Blocks.of(parameter).scales(one.megatron_slices).cpu().numpy()
            assert np.array_equal(sent[one.hf_name][one.hf_slices], codes), one.hf_name
            assert np.array_equal(sent[one.hf_name + "_scale_inv"][touched], scales), one.hf_name
    found = code_metrics(staged.codes)["publish/as_is_share"]
    assert all(agreed) == (found == 1.0) == (share == 1.0) and found > 0


def test_the_probe_of_fp8_parameters_is_that_of_their_values_and_leaves_them_unchanged(single_rank, tmp_path):
    directory = save_model("blocks", tmp_path / "model", dtype=torch.bfloat16)
    trainer = trainer_of(single_rank, directory, "blockwise_param", format="bf16")
    losses(trainer, steps=1)
    before = contents(trainer)
    trainer.plan_publishes(())
    trainer.stage(WeightVersion(1), MemorySender())
    found = trainer.probe(PROBE).logprobs
    assert same(contents(trainer), before)
    trainer.export(str(tmp_path / "exported"))
    plain = trainer_of(single_rank, tmp_path / "exported", "none", format="bf16")
    plain.plan_publishes(())
    plain.stage(WeightVersion(1), MemorySender())
    np.testing.assert_allclose(found, plain.probe(PROBE).logprobs, atol=1e-3)


def test_the_policy_of_a_save_of_fp8_parameters_is_exported_as_the_trainer_exports_it(single_rank, tmp_path):
    from megatron_rl.trainer.saves import SavedPolicy

    directory = save_model("blocks", tmp_path / "model", dtype=torch.bfloat16)
    trainer = trainer_of(single_rank, directory, "blockwise_param")
    losses(trainer, steps=1)
    save(trainer, str(tmp_path / "saved"))
    trainer.export(str(tmp_path / "by_trainer"))
    SavedPolicy(replace(trainer.spec, exports=str(tmp_path / "saved")), single_rank).export(str(tmp_path / "by_save"))
    (trained,), (found,) = ([*(tmp_path / name).glob("*.safetensors")] for name in ("by_trainer", "by_save"))
    expected = load_file(trained)
    assert load_file(found).keys() == expected.keys()
    for name, tensor in load_file(found).items():
        assert torch.equal(tensor, expected[name]), name


def test_training_resumed_from_a_checkpoint_of_fp8_parameters_is_unchanged(single_rank, tmp_path):
    directory = save_model("blocks", tmp_path / "model", dtype=torch.bfloat16)
    trainer = trainer_of(single_rank, directory, "blockwise_param")
    losses(trainer, steps=1)
    save(trainer, str(tmp_path / "saved"))
    resumed = trainer_of(single_rank, directory, "blockwise_param")
    resumed.load(str(tmp_path / "saved"))
    for name, master in masters(trainer).items():
        assert torch.equal(masters(resumed)[name], master), name
        left, right = (fp8_parameters.decoded(primaries(one)[name]) for one in (trainer, resumed))
        assert torch.equal(left, right), name
    assert losses(resumed) == pytest.approx(losses(trainer), rel=1e-3)


@pytest.mark.parametrize("fp8", ["blockwise", "blockwise_param"])
def test_training_after_offloading_to_host_memory_is_unchanged(single_rank, tmp_path, fp8):
    trainer = trainer_of(single_rank, save_model("blocks", tmp_path / "model", dtype=torch.bfloat16), fp8)
    (first,) = losses(trainer, steps=1)
    before = contents(trainer)
    parts = [part for one in trainer._model.parameters() for part in fp8_parameters.buffers(one)]
    freed = trainer.offload(("weights", "gradients", "optimizer"))
    assert all(part.untyped_storage().nbytes() == 0 for part in parts)
    assert freed >= sum(2 * one.numel() for one in trainer._model.parameters())
    trainer.onload()
    assert same(contents(trainer), before)
    assert losses(trainer, steps=1)[0] < first


@pytest.mark.parametrize("fp8", ["none", "blockwise_param"])
def test_states_in_host_memory_take_no_device_memory_between_updates(single_rank, tmp_path, fp8):
    directory = save_model("blocks", tmp_path / "model", dtype=torch.bfloat16)
    expected = losses(trainer_of(single_rank, directory, fp8), steps=3)
    trainer = trainer_of(single_rank, directory, fp8, states_on_host=True)
    found = losses(trainer, steps=2)
    hosted = trainer._policy.hosted
    gc.collect()  # the trainer before, which has cycles, is gone from here on
    away = torch.cuda.memory_allocated()
    hosted.to_device()
    states = 12 * sum(one.numel() for one in trainer._model.parameters())
    assert torch.cuda.memory_allocated() - away >= states
    on_device = [one.detach().clone() for one in state_tensors(trainer)]
    hosted.to_host()
    hosted.to_device()
    assert all(torch.equal(*pair) for pair in zip(state_tensors(trainer), on_device, strict=True))
    del on_device
    hosted.to_host()
    assert torch.cuda.memory_allocated() == away
    assert [*found, *losses(trainer, steps=1)] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("fp8", ["none", "blockwise_param"])
def test_a_load_holds_the_states_once(single_rank, tmp_path, fp8):
    """A second copy of the moments would add two thirds; the weights of gated layers are joined from two halves."""
    directory = save_model("blocks", tmp_path / "model", dtype=torch.bfloat16)
    trainer = trainer_of(single_rank, directory, fp8, states_on_host=True)
    losses(trainer, steps=2)
    save(trainer, str(tmp_path / "saved"))
    expected = losses(trainer, steps=1)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer.load(str(tmp_path / "saved"))
    states = 12 * sum(one.numel() for one in trainer._model.parameters())
    assert states <= torch.cuda.max_memory_allocated() - before < 1.3 * states
    assert torch.cuda.memory_allocated() <= before
    assert losses(trainer, steps=1) == pytest.approx(expected, rel=1e-3)


def state_tensors(trainer):
    """Masters and moments."""
    (part,) = trainer._policy.optimizer.chained_optimizers
    for parameter in (parameter for group in part.optimizer.param_groups for parameter in group["params"]):
        yield parameter
        yield from (part.optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq"))
