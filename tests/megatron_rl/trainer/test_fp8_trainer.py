"""A trainer whose weights are FP8, with Megatron's buffers, optimizer and checkpoints, on a CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.config import AlgorithmConfig, ParallelConfig
from megatron_rl.quantization import fp8_parameters
from megatron_rl.quantization.fp8 import block_amax, fp8_block_codes, fp8_scale
from megatron_rl.weights.fp8_passthrough import blocks_agree
from rollout.types import WeightVersion
from rollout.weights.format import LAYOUTS
from tests.megatron_rl.trainer.test_trainer import DP2, TP2, assembled, batch_for, trainer_spec
from tests.support.trainers.fake_fp8_parameter import in_megatron
from tests.support.trainers.memory_sender import MemorySender
from tests.support.trainers.saves import save
from tests.support.trainers.tiny_megatron_models import save_model

ALGORITHM = AlgorithmConfig(group_size=4, prompts_per_step=4)
PROBE = list(range(1, 13))


def trainer_of(position, parallel, directory, fp8):
    from megatron_rl.trainer.trainer import Trainer

    spec = trainer_spec(directory, parallel, ALGORITHM, format="fp8_block", distributed=True)
    return Trainer(replace(spec, config=spec.config.model_copy(update={"dtype": "bf16", "fp8": fp8})), position)


def primaries(trainer):
    return {name: one for name, one in trainer._model.named_parameters() if fp8_parameters.is_fp8_parameter(one)}


def codes_of(weight):
    scale = fp8_scale(block_amax(weight), power_of_two=True, dtype=torch.bfloat16)
    return fp8_block_codes(weight, scale).view(torch.uint8)


def contents(trainer):
    return [part.nan_to_num().clone() for one in trainer._model.parameters() for part in fp8_parameters.buffers(one)]


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def through_a_step(position, parallel, directory, work, batch):
    """Asserts on this rank; returns its published bytes, its plan, and its codes and scales where blocks agree."""
    with in_megatron():
        plain = trainer_of(position, parallel, directory, "none")
        loaded = {name: one.detach().clone() for name, one in plain._model.named_parameters()}
        trainer = trainer_of(position, parallel, directory, "blockwise_param")
        assert len(primaries(trainer)) == 4 * 2
        held = 0
        for name, one in primaries(trainer).items():
            assert torch.equal(one._rowwise_data, codes_of(loaded[name])), name
            assert one.get_high_precision_init_val() is None, "masters have been made of it"
            master = getattr(one, "main_param", None)
            if master is not None:
                held += master.numel()
                # and not those of weights rounded to FP8
                assert np.isin(master.clone().numpy(), loaded[name].float().numpy()).all(), name
        assert held == sum(one.numel() for one in primaries(trainer).values()) or parallel.data > 1

        before = contents(trainer)
        trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
        assert not same(contents(trainer), before)
        sender, after = MemorySender(), contents(trainer)
        trainer.plan_publishes(())
        trainer.stage(WeightVersion(1), sender)
        assert trainer.probe(PROBE) is not None
        assert same(contents(trainer), after), "the probe put back what was there"

        parts = [part for one in trainer._model.parameters() for part in fp8_parameters.buffers(one)]
        trainer.offload(("weights", "gradients", "optimizer"))
        assert all(part.untyped_storage().nbytes() == 0 for part in parts)
        trainer.onload()
        assert same(contents(trainer), after)

        trainer.export(f"{work}/exported")
        exported = trainer_of(position, parallel, f"{work}/exported", "none")
        for name, one in trainer._model.named_parameters():
            values = fp8_parameters.decoded(one) if fp8_parameters.is_fp8_parameter(one) else one.detach()
            assert torch.equal(dict(exported._model.named_parameters())[name].detach(), values), name

        save(trainer, f"{work}/saved")
        from megatron.core import dist_checkpointing

        from megatron_rl.trainer.saves import SavedPolicy

        saved_policy = SavedPolicy(replace(trainer.spec, exports=f"{work}/saved"), position)
        for name, one in saved_policy._model.named_parameters():
            assert torch.equal(one, dict(exported._model.named_parameters())[name]), name

        saved = dist_checkpointing.load_plain_tensors(f"{work}/saved")
        assert {type(one) for name, one in saved.items() if name.endswith(".weight")} == {torch.Tensor}
        if parallel.tensor == 1:
            stacked = saved["decoder.layers.self_attention.linear_proj.weight"]
            for layer, one in enumerate(stacked):
                name = f"decoder.layers.{layer}.self_attention.linear_proj.weight"
                assert torch.equal(one, fp8_parameters.decoded(primaries(trainer)[name])), name
        return sender.contents, trainer.publishes.plan, list(own_blocks(trainer))


def own_blocks(trainer):
    for one in trainer._held:
        parameter = primaries(trainer).get(one.megatron_name)
        if parameter is not None and blocks_agree(one, tuple(parameter.shape)):
            blocks = fp8_parameters.Blocks.of(parameter)
            codes = blocks.codes[one.megatron_slices].view(torch.uint8).numpy()
            yield one, codes.copy(), blocks.scales(one.megatron_slices).numpy().copy()


@pytest.mark.parametrize("parallel", [ParallelConfig(), TP2, DP2])
def test_fp8_weights_are_loaded_trained_published_probed_exported_saved_and_moved(ranks, tmp_path, parallel):
    directory = save_model("blocks", tmp_path / "model", dtype=torch.bfloat16)
    outcomes = ranks.run(through_a_step, directory, tmp_path, batch_for(parallel, ALGORITHM), parallel=parallel)
    sent = assembled([(None, buckets, None, plan) for buckets, plan, _ in outcomes])
    leaves = set()
    for _, _, blocks in outcomes:
        for one, codes, scales in blocks:
            leaves.add(one.hf_name.split(".")[-2])
            assert np.array_equal(sent[one.hf_name][one.hf_slices], codes), one.hf_name
            touched = LAYOUTS["fp8_block"].touched(one.hf_start, one.shape)
            assert np.array_equal(sent[one.hf_name + "_scale_inv"][touched], scales), one.hf_name
    networks = {"gate_proj", "up_proj", "down_proj"}
    assert leaves == {"q_proj", "k_proj", "v_proj", "o_proj"} | (networks if parallel.tensor == 1 else set())
