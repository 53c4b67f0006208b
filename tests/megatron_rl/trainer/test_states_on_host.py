"""An optimizer whose states stay in host memory: same numbers as on the device, and nothing there between updates.

On a CPU both are the same memory. A storage that is away is empty in either case, so a use of it fails or is seen.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.megatron_rl.trainer.test_trainer import (
    ALGORITHMS,
    DP2,
    assembled,
    batch_for,
    finish_with,
    load_and_train,
    trainer_spec,
)
from tests.support.trainers.tiny_megatron_models import save_model

ALGORITHM = ALGORITHMS["two mini batches, two epochs, normalised sequence TIS"]


def state_bytes(trainer) -> int:
    """Bytes of masters and moments on the device, without storages that are the weights' too."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in trainer._model.parameters()}
    whole = trainer._policy.optimizer
    tensors = [
        tensor
        for part in getattr(whole, "chained_optimizers", [whole])
        for tensor in (
            *(parameter for group in part.optimizer.param_groups for parameter in group["params"]),
            *(value for state in part.optimizer.state.values() for value in state.values()),
        )
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in weights
    ]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def train_and_save(position, parallel, spec, batch, path):
    """A step, two saves, a step; returns its outcome, and the bytes of states in every forward and between calls."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    between, forward = [state_bytes(trainer)], []
    trainer._model.register_forward_pre_hook(lambda *_: forward.append(state_bytes(trainer)))
    trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
    between.append(state_bytes(trainer))
    trainer.begin_save(str(path / "background"), background=True)
    between.append(state_bytes(trainer))
    trainer.finish_save()
    trainer.begin_save(str(path / "waiting"), background=False)
    trainer.finish_save()
    between.append(state_bytes(trainer))
    outcome = finish_with(trainer, batch)
    between.append(state_bytes(trainer))
    return outcome, between, forward


@pytest.mark.parametrize(("dtype", "distributed"), [("fp32", False), ("bf16", False), ("bf16", True)])
def test_states_in_host_memory_change_no_number_and_are_away_between_updates(
    ranks, tmp_path: Path, dtype: str, distributed: bool
):
    save_model("qwen3", tmp_path / "model", dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    batch, specs, wholes = batch_for(DP2, ALGORITHM), {}, {}
    for hosted in (False, True):
        spec = trainer_spec(tmp_path / "model", DP2, ALGORITHM, distributed=distributed, states_on_host=hosted)
        specs[hosted] = replace(spec, config=spec.config.model_copy(update={"dtype": dtype}))
        results = ranks.run(train_and_save, specs[hosted], batch, tmp_path / str(hosted), parallel=DP2)
        wholes[hosted] = assembled([outcome for outcome, *_ in results])
        for _, between, forward in results:
            assert len(forward) >= 8
            if hosted:
                assert not any(between) and not any(forward)
            else:
                assert all(between[1:]) and forward[-1] > 0
    for name, tensor in wholes[False].items():
        assert np.array_equal(wholes[True][name], tensor), name
    for hosted, spec in specs.items():
        for kind in ("background", "waiting"):
            saved = tmp_path / str(not hosted) / kind
            found = assembled(ranks.run(load_and_train, spec, batch, saved, parallel=DP2))
            assert all(np.array_equal(found[name], tensor) for name, tensor in wholes[False].items()), (hosted, kind)
