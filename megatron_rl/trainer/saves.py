"""A trainer's checkpoint: policy, and in folders of their own critic and reference policy.

    PATH              policy, optimizer, schedule, generators
    PATH/critic       the same of the critic
    PATH/reference    weights of the reference policy, if it has been refreshed or may be; also after a resume

Invariant: the policy's part is completed last, so a complete PATH has complete folders.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.checkpoints.writer import CheckpointWriter
from megatron_rl.model.build import build
from megatron_rl.model.parallel import Position
from megatron_rl.model.spec import read_model_spec
from megatron_rl.trainer import checkpoint
from megatron_rl.trainer.building import model_options
from megatron_rl.trainer.messages import TrainerSpec
from megatron_rl.trainer.offload import HostedStates
from megatron_rl.trainer.optimizer import LearnedModel
from megatron_rl.trainer.reference import Reference
from megatron_rl.weights import hf_export
from rollout import progress

CRITIC, REFERENCE = "critic", "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a rank saves."""

    policy: LearnedModel
    critic: LearnedModel | None = None
    reference: Reference | None = None
    is_refreshed: bool = False
    """Whether the reference changes during the run."""


class Saves:
    """The saves of one rank, one at a time; every method but `seconds` is a collective."""

    def __init__(self, parts: Parts, writers: Executor | None) -> None:
        """`writers`: threads that write files; None for threads of its own."""
        self._parts = parts
        self._writer_threads = writers
        self._policy = CheckpointWriter(writers)
        self._critic = CheckpointWriter(writers) if parts.critic is not None else None
        saves_reference = parts.reference is not None and parts.is_refreshed
        self._reference = CheckpointWriter(writers) if saves_reference else None

    def begin(self, path: Path, coefficients: Mapping[str, float], *, background: bool) -> None:
        """Start writing all parts, and the coefficients of the loss with the policy."""
        parts = self._parts
        for hosted in self._hosted:
            hosted.to_device()
        checkpoint.begin_save(path, parts.policy, self._policy, coefficients=coefficients, background=background)
        if parts.critic is not None and self._critic is not None:
            checkpoint.begin_save(path / CRITIC, parts.critic, self._critic, background=background)
        if parts.reference is not None and self._reference is not None:
            checkpoint.begin_reference_save(
                path / REFERENCE, parts.policy, parts.reference, self._reference, background=background
            )
        if background:
            self._release()

    def seconds(self) -> float | None:
        """From the begin to the last file of this rank; None before."""
        seconds = [writer.seconds() for writer in self._writers]
        known = [each for each in seconds if each is not None]
        return max(known) if len(known) == len(seconds) else None

    def finish(self) -> float:
        """Wait for the files and complete the checkpoint. Returns the seconds to the last file.

        Raises:
            OSError: a file could not be written.
        """
        try:
            return max(writer.finish() for writer in self._writers)
        finally:
            self._release()

    def _release(self) -> None:
        """Send states that stay in host memory back there; writers without copies need them on the device."""
        for hosted in self._hosted:
            hosted.to_host()

    @property
    def _hosted(self) -> Sequence[HostedStates]:
        models = (self._parts.policy, self._parts.critic)
        return [model.hosted for model in models if model is not None and model.hosted is not None]

    @property
    def _writers(self) -> Sequence[CheckpointWriter]:
        """In the order in which their parts are completed."""
        return [writer for writer in (self._critic, self._reference, self._policy) if writer is not None]

    def load(self, path: Path) -> object:
        """Restore a finished save, and return the coefficients that it holds.

        A checkpoint without a reference was saved before the reference changed. A reference that was restored is saved
        from now on: it is not the initial model, also if it changes no more.

        Raises:
            ValueError: a part is missing, was saved by another kind of optimizer, or cannot be read.
        """
        parts = self._parts
        coefficients = checkpoint.load(path, parts.policy)
        if parts.critic is not None:
            if not checkpoint.is_complete(path / CRITIC):
                raise ValueError(
                    f"{path} holds no critic, but `algorithm` needs one now; restore the algorithm that the run began "
                    "with, or start another run_dir"
                )
            checkpoint.load(path / CRITIC, parts.critic, optimizer_key="trainer.critic.optimizer")
        if parts.reference is not None and checkpoint.is_complete(path / REFERENCE):
            checkpoint.load_reference(path / REFERENCE, parts.policy, parts.reference)
            self._reference = self._reference or CheckpointWriter(self._writer_threads)
        return coefficients


class SavedPolicy:
    """The policy of a finished save on one rank that has joined the world, to be exported: parameters and nothing else.

    A trainer would need gradients and an optimizer, which a run may spread over more replicas than an export has. So
    32 billion parameters can be exported by the devices that hold their BF16 weights. FP8 parameters are saved as BF16
    values, so the policy is built without FP8.
    """

    def __init__(self, spec: TrainerSpec, position: Position) -> None:
        """Build this rank's part of the model and load the weights of the save `spec.exports`; a collective.

        Raises:
            ValueError: there is no finished save, or its files are damaged or hold objects that may run code.
        """
        self._spec = spec
        self._position = position
        progress.mark("model")
        options = replace(model_options(spec), fp8="none", recompute="none")
        (self._model,) = build(read_model_spec(Path(spec.model)), spec.config.parallel, position, options)
        progress.mark("saved weights")
        checkpoint.load_weights(Path(spec.exports), self._model)

    def export(self, path: str) -> None:
        """Write the policy as a Hugging Face directory in the trainer's dtype; a collective."""
        hf_export.export(
            self._model,
            self._spec.config.parallel,
            self._position,
            source=Path(self._spec.model),
            destination=Path(path),
        )
