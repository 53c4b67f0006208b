"""A trainer rank trains, publishes, is offloaded, saves, loads and exports: `trainer_case FAMILY FP8 FORMAT RECOMPUTE`.

A second one keeps its optimizer's states in host memory. A third one has a critic, and a reference policy in host
memory. Copies are real on stub devices and optimizer steps change nothing there, so what is published in BF16 and
exported must be the model that was loaded.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron_rl.algorithm_config import EntropyConfig
from megatron_rl.config import AlgorithmConfig, CorrectionConfig, ParallelConfig, ReferenceConfig
from megatron_rl.model import parallel
from megatron_rl.model.parallel import Position
from megatron_rl.trainer.messages import TrainerSpec
from megatron_rl.trainer.trainer import Trainer
from rollout.types import WeightVersion
from tests.megatron_rl.trainer.test_trainer import assembled, batch_for, trainer_spec
from tests.rehearsal.stages import stage
from tests.support.engines.packing import stacked
from tests.support.trainers.memory_sender import MemorySender
from tests.support.trainers.saves import save
from tests.support.trainers.tiny_megatron_models import save_model

ONE = AlgorithmConfig()
FOUR = AlgorithmConfig(
    num_mini_batches=2,
    num_epochs=2,
    entropy=EntropyConfig(coefficient=0.01),
    correction=CorrectionConfig(batch_normalize=True),
)


PPO = AlgorithmConfig.model_validate({"advantage": "gae", "filter": "none", "kl": {"place": "loss"}})


class DeviceSender(MemorySender):
    """Buckets on a device."""

    def open(self, weight_version, buckets):
        sizes = {bucket.index: bucket.num_bytes for bucket in buckets}
        self.buckets |= {number: torch.zeros(size, dtype=torch.uint8, device="cuda") for number, size in sizes.items()}


def train(trainer: Trainer, algorithm: AlgorithmConfig) -> None:
    trainer._learner._algorithm = algorithm
    batch = batch_for(ParallelConfig(), algorithm, max_tokens=400).of_rank(trainer.data_rank)
    trainer.train(batch, lambda refs: refs)


def ppo(spec: TrainerSpec, position: Position, folder: Path) -> None:
    """A critic and a reference beside the policy; FP8 parameters have a reference that never changes."""
    refreshed = {"reference": ReferenceConfig(refresh_every=int(spec.config.fp8 != "blockwise_param"))}
    spec = replace(spec, algorithm=PPO, config=spec.config.model_copy(update=refreshed))
    trainer = stage("build with critic and reference", lambda: Trainer(spec, position))
    if trainer is None:
        return
    batch = batch_for(ParallelConfig(), PPO, max_tokens=400)
    later = replace(batch, policy_version=1)
    stage("an update of policy and critic", lambda: trainer.train(batch.of_rank(0), lambda refs: refs))
    stage("offload critic and policy", lambda: trainer.offload(("gradients", "optimizer", "weights")))
    stage("onload critic and policy", trainer.onload)
    stage("a new reference, and an update", lambda: trainer.train(later.of_rank(0), lambda refs: refs))
    stage("save critic and reference", lambda: save(trainer, str(folder / "ppo")))
    stage("load critic and reference", lambda: trainer.load(str(folder / "ppo")))


def hosted(spec: TrainerSpec, position: Position, folder: Path) -> None:
    """Masters and moments in pinned host memory, but in updates and saves."""
    optimizer = spec.config.optimizer.model_copy(update={"states_on_host": True})
    spec = replace(spec, config=spec.config.model_copy(update={"optimizer": optimizer}))
    trainer = stage("build with states in host memory", lambda: Trainer(spec, position))
    if trainer is None:
        return
    stage("an update with states in host memory", lambda: train(trainer, ONE))
    stage("offload beside states in host memory", lambda: trainer.offload(("gradients", "optimizer", "weights")))
    stage("onload beside states in host memory", trainer.onload)
    stage("save states in host memory", lambda: save(trainer, str(folder / "hosted")))
    stage("load states in host memory", lambda: trainer.load(str(folder / "hosted")))
    stage("an update of loaded states", lambda: train(trainer, ONE))


def published(trainer: Trainer, sender: MemorySender) -> dict[str, torch.Tensor]:
    """The tensors of a publish in BF16 whose buckets are all of this rank."""
    whole = assembled([(None, sender.contents, None, trainer.publishes.plan)])
    return {name: torch.from_numpy(raw).view(torch.bfloat16) for name, raw in whole.items()}


def check_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Names and bytes."""
    assert found.keys() == expected.keys(), f"other names: {sorted(found.keys() ^ expected.keys())}"
    wrong = [
        name for name in expected if not torch.equal(*(each[name].view(torch.int16) for each in (found, expected)))
    ]
    assert not wrong, f"other bytes than in the model: {wrong}"


def publish_from_host(trainer: Trainer, directory: Path) -> None:
    sender = MemorySender()
    trainer.stage(WeightVersion(1), sender)
    if trainer.spec.format.name == "bf16":
        check_equal(published(trainer, sender), stacked(load_file(directory / "model.safetensors")))


def export(trainer: Trainer, destination: Path, directory: Path) -> None:
    trainer.export(str(destination))
    if trainer.spec.config.fp8 != "blockwise_param":  # FP8 weights come from a kernel
        check_equal(*(load_file(folder / "model.safetensors") for folder in (destination, directory)))


def main(family: str, fp8: str, format: str, recompute: str) -> None:
    folder = Path(tempfile.mkdtemp())
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    position = stage(
        "initialize", lambda: parallel.initialize(ParallelConfig(), rank=0, store=store, timeout_s=60, seed=0)
    )
    directory = save_model(family, folder / "model", dtype=torch.bfloat16)
    spec = trainer_spec(directory, ParallelConfig(), ONE, format=format, distributed=True)
    config = spec.config.model_copy(update={"dtype": "bf16", "fp8": fp8, "recompute": recompute})
    trainer = stage("build", lambda: Trainer(replace(spec, config=config), position))
    if trainer is None:
        return
    stage("plan publishes", lambda: trainer.plan_publishes(()))
    stage("an update", lambda: train(trainer, ONE))
    stage("four updates with entropy bonus and normalised weights", lambda: train(trainer, FOUR))
    stage("publish from host memory", lambda: publish_from_host(trainer, directory))
    stage("publish from the device", lambda: trainer.stage(WeightVersion(2), DeviceSender()))
    stage("proof", lambda: trainer.proof(list(range(1, 13))))
    stage("offload", lambda: trainer.offload(("gradients", "optimizer", "weights")))
    stage("onload", trainer.onload)
    stage("an update after it", lambda: train(trainer, ONE))
    stage("save", lambda: save(trainer, str(folder / "saved")))
    stage("load", lambda: trainer.load(str(folder / "saved")))
    stage("export", lambda: export(trainer, folder / "exported", directory))
    hosted(replace(spec, config=config), position, folder)
    ppo(replace(spec, config=config), position, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # libraries wait for the driver at exit
