"""One trainer rank: its model, learner, share of publishing, and checkpoints.

SPMD: uses torch.distributed, not Ray; all ranks call every method together. `megatron_rl.trainer.actor` wraps it in a
Ray actor; tests call it in a pool of processes.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_rl.batching.batch import RankBatch
from megatron_rl.batching.sft_batch import SftBatch
from megatron_rl.model import fp8_compute
from megatron_rl.model.build import build, layer_names
from megatron_rl.model.packed_batch import pack_batch
from megatron_rl.model.parallel import Position, device
from megatron_rl.model.spec import read_model_spec
from megatron_rl.trainer import probe
from megatron_rl.trainer.building import build_further, held_shards, model_options, policy_updates
from megatron_rl.trainer.learner import Learner
from megatron_rl.trainer.loaded_batch import FetchColumns
from megatron_rl.trainer.messages import ProbeResult, StagedWeights, StepResult, TrainerProof, TrainerSpec
from megatron_rl.trainer.mismatch_sample import MismatchSample
from megatron_rl.trainer.offload import Offloader, Part
from megatron_rl.trainer.optimizer import LearnedModel
from megatron_rl.trainer.saves import Parts, Saves
from megatron_rl.weights import hf_export, hf_load
from megatron_rl.weights.packer import WeightPacker
from megatron_rl.weights.reshard_plan import ReshardPlan, plan_reshard
from megatron_rl.weights.shards import is_first_replica
from rollout import progress
from rollout.data.sft_rows import SftRows
from rollout.transports.base import Sender
from rollout.types import WeightVersion
from rollout.weights.manifest import Required


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPublishes:
    """What all publishes of a run have in common on one trainer rank."""

    plan: ReshardPlan
    """Equal on all ranks and in the controller."""
    packer: WeightPacker
    """Fills this rank's buckets of the plan."""


class Trainer:
    """One rank that has joined the world (`parallel.initialize`)."""

    def __init__(self, spec: TrainerSpec, position: Position, *, writers: Executor | None = None) -> None:
        """Build this rank's part of the model and load its weights.

        `writers`: threads that write checkpoints; None for threads of its own.
        """
        self.spec = spec
        self._position = position
        parallel = spec.config.parallel
        self._model_spec = read_model_spec(Path(spec.model))
        self._uses_te_layer_names = layer_names() == "te"
        self._held = held_shards(self._model_spec, spec, position)
        progress.mark("model")
        models = build(self._model_spec, parallel, self._position, model_options(spec))
        (self._model,) = models
        hf_load.load(self._model, self._held, self._model_spec, Path(spec.model))
        progress.mark("optimizer")
        config = spec.config
        self._policy = LearnedModel.of(
            models, config.optimizer, dtype=config.dtype, total_updates=policy_updates(spec), fp8=config.fp8
        )
        self._further = build_further(spec, position, self._policy)
        self._learner = self._build_learner()
        critic = None if self._further.critic is None else self._further.critic.model
        self._offloader = Offloader(self._policy, critic, self._further.frozen)
        parts = Parts(
            policy=self._policy,
            critic=critic,
            reference=self._further.reference,
            is_refreshed=config.reference.refresh_every > 0,
        )
        self._saves = Saves(parts, writers)
        self._publishes: PlannedPublishes | None = None
        """None until `plan_publishes`; SFT publishes nothing."""
        self._staged: int | None = None
        """Version of the last `stage`."""
        self._sample = MismatchSample(
            chunks=self._policy.chunks,
            limit_tokens=spec.algorithm.mismatch_sample_tokens,
            max_micro_batch_tokens=spec.config.max_micro_batch_tokens,
            temperature=spec.temperature,
            row_multiple=self.row_multiple,
            device=device(),
            ages_by_token=spec.publish.in_flight != "keep_kv",
        )

    def _build_learner(self) -> Learner:
        return Learner(
            self._policy,
            algorithm=self.spec.algorithm,
            temperature=self.spec.temperature,
            max_response_tokens=self.spec.max_response_tokens,
            row_multiple=self.row_multiple,
            device=device(),
            models=self._further,
        )

    def plan_publishes(self, required: Sequence[Required]) -> None:
        """Plan what later publishes send to which engine rank; `required` as in `plan_reshard`."""
        plan = plan_reshard(
            self._model_spec,
            self.spec.config.parallel,
            format=self.spec.format,
            bucket_bytes=self.spec.publish.bucket_bytes,
            uses_te_layer_names=self._uses_te_layer_names,
            required=required,
        )
        tensor_parallel = self.spec.config.parallel.tensor > 1
        packer = WeightPacker(
            plan,
            rank=self._position.rank,
            held=self._held,
            parameters=dict(self._model.named_parameters()),
            tensor_group=parallel_state.get_tensor_model_parallel_group() if tensor_parallel else None,
            fingerprints=lambda shard: is_first_replica(shard, self.spec.config.parallel, self._position.data),
        )
        self._publishes = PlannedPublishes(plan=plan, packer=packer)

    @property
    def publishes(self) -> PlannedPublishes:
        """What `plan_publishes` planned.

        Raises:
            RuntimeError: no publish is planned.
        """
        if self._publishes is None:
            raise RuntimeError(
                f"trainer rank {self._position.rank} has no plan of publishes; call plan_publishes before the first one"
            )
        return self._publishes

    @property
    def row_multiple(self) -> int:
        """Rows of a packed batch are padded to a multiple of this."""
        tensor = self.spec.config.parallel.tensor
        return fp8_compute.row_multiple(self.spec.config.fp8, tensor=tensor) if torch.cuda.is_available() else tensor

    @property
    def data_rank(self) -> int:
        """Data-parallel rank: the part of a batch that this rank trains on."""
        return self._position.data

    def train(self, batch: RankBatch, fetch: FetchColumns) -> StepResult:
        """One step of policy learning on this rank's part. Metrics are complete on the last pipeline stage only.

        Raises:
            RuntimeError: the part is that of another rank, so some samples would count twice and others not at all.
        """
        if batch.data_rank != self.data_rank:
            raise RuntimeError(
                f"data-parallel rank {self.data_rank} received the part of data-parallel rank {batch.data_rank}"
            )
        every, reference = self.spec.config.reference.refresh_every, self._further.reference
        if reference is not None and every and batch.policy_version and batch.policy_version % every == 0:
            progress.mark("refresh reference")
            reference.refresh()
        self._learner.use_cap(self.spec.algorithm.correction.cap if batch.cap is None else batch.cap)
        parts = self._mismatch_parts(batch, fetch)
        result = self._learner.train(batch, fetch)
        return replace(result, metrics=result.metrics | parts)

    def _mismatch_parts(self, batch: RankBatch, fetch: FetchColumns) -> dict[str, float]:
        """Parts of the mismatch, if the engines' newest weights are this trainer's and the batch has responses."""
        if not self._sample.limit_tokens or self._staged != batch.policy_version or not batch.mini_batches:
            return {}
        return self._sample.measure(batch, fetch, self.publishes.packer.published_values)

    def sft_step(self, batch: SftBatch, rows: SftRows) -> StepResult:
        """One optimizer step of SFT. Metrics are complete on the last pipeline stage only."""
        micro_batches = batch.micro_batches[self._position.data]
        dummy = np.zeros(1, dtype=np.int32)
        packed = [
            pack_batch(
                [(rows.prompts[row], rows.responses[row]) for row in micro] or [(dummy, dummy)],
                multiple_of=self.row_multiple,
            ).to(device())
            for micro in micro_batches
        ]
        return self._learner.sft_step(packed, [not micro for micro in micro_batches], batch.num_tokens)

    def stage(self, weight_version: WeightVersion, sender: Sender, *, with_sums: bool = True) -> StagedWeights:
        """Quantise with new scales and pass this rank's buckets to `sender`; `with_sums` as in `WeightPacker.send`."""
        packer = self.publishes.packer
        self._staged = int(weight_version)
        started = time.perf_counter()
        progress.mark("scales")
        packer.refresh_scales()
        scales_s = time.perf_counter() - started
        path = packer.send(
            sender, weight_version, with_sums=with_sums
        )  # a rank without buckets may forward buckets of others
        return StagedWeights(
            rank=self._position.rank,
            path=path,
            num_bytes=sender.sent_bytes,
            scales_s=scales_s,
            pack_s=packer.pack_s,
            send_s=packer.send_s,
            sums_s=packer.sums_s,
            fault=sender.fault,
            codes=packer.watch.sums(),
        )

    def proof(self, token_ids: Sequence[int]) -> TrainerProof:
        """What engines must find after the last `stage`: this rank's sums, and the probe's log-probabilities."""
        return TrainerProof(sums=self.publishes.packer.published_fingerprint(), probe=self.probe(token_ids))

    def probe(self, token_ids: Sequence[int]) -> ProbeResult | None:
        """Log-probabilities of the probe prompt under the trainer's weights."""
        return probe.probe(self._policy.chunks, token_ids, row_multiple=self.row_multiple, device=device())

    def offload(self, parts: Sequence[Part]) -> int:
        """Move parts of this rank to host memory; returns the bytes freed on its device."""
        freed = self._offloader.offload(parts)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the engine is another process and cannot use reserved memory
        return freed

    def onload(self) -> None:
        """Move everything in host memory back to the device."""
        self._offloader.onload()

    def begin_save(self, path: str, *, background: bool) -> None:
        """Start writing model, optimizer, schedule and generator states below `path`.

        With `background` files are written from copies, so the trainer may go on. Without it, finish the save first.
        """
        self._saves.begin(Path(path), self._learner.saved_coefficients(), background=background)

    def save_seconds(self) -> float | None:
        """From the begin of the save to the last file of this rank, whether or not that failed; None before."""
        return self._saves.seconds()

    def finish_save(self) -> float:
        """Wait for the files of the save and complete the checkpoint. Returns the seconds to the last file.

        Raises:
            OSError: this rank could not write a file.
        """
        return self._saves.finish()

    def load(self, path: str) -> None:
        """Restore a finished save, possibly under another partition."""
        self._learner.restore_coefficients(self._saves.load(Path(path)))

    def export(self, path: str) -> None:
        """Write the policy as a Hugging Face directory in the trainer's dtype."""
        self.onload()
        hf_export.export(
            self._model,
            self.spec.config.parallel,
            self._position,
            source=Path(self.spec.model),
            destination=Path(path),
        )
