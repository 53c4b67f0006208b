"""A run with its model and its places: what all estimates start from. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.cluster.placement import Placement
from launcher.config.schema import RunConfig
from megatron_rl.activations import Kernels
from megatron_rl.memory import NO_FURTHER, FurtherSpecs, MemoryItem, largest, trainer_stages, weight_bytes
from megatron_rl.model.spec import ModelSpec
from rollout.weights.format import WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A configuration that can be placed."""

    config: RunConfig
    spec: ModelSpec
    placement: Placement
    further: FurtherSpecs = NO_FURTHER
    """What the algorithm needs beside the policy."""
    kernels: Kernels = "fused"
    """Of the trainer's layers (`launcher.estimate.trainer_kernels`)."""
    num_prompts: int = 0
    """Number of training prompts; 0 if unknown, because their files were not read."""

    @property
    def publish_bytes(self) -> int:
        """Bytes of one copy of all weights in the engines' format."""
        return weight_bytes(self.spec, WeightFormat.of(self.config.engine))

    @property
    def sends_deltas(self) -> bool:
        """Whether publishes send changes, for which both sides keep the last publish."""
        return self.config.publish.delta and not self.placement.declines_delta

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.config.data.max_prompt_tokens + self.config.sampling.max_response_tokens

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step's samples: as many groups as there may be, and all of the longest samples."""
        return self.config.algorithm.max_groups * self.config.algorithm.group_size * self.longest_sample

    @property
    def trainer_rank(self) -> Sequence[MemoryItem]:
        """Memory of the trainer rank that has most in all."""
        return largest(self.trainer_stages)

    @property
    def trainer_stages(self) -> Sequence[Sequence[MemoryItem]]:
        """Memory of a trainer rank of each pipeline stage."""
        return trainer_stages(
            self.spec,
            self.config.trainer,
            longest_sample=self.longest_sample,
            step_tokens=self.step_tokens,
            further=self.further,
            kernels=self.kernels,
        )

    @property
    def draft_tokens(self) -> int:
        """Most drafted tokens of a request in one forward."""
        return self.config.history.max_draft_tokens if self.config.drafts else 0

    @property
    def in_turns(self) -> bool:
        """Whether trainer and engines free device memory for each other."""
        config = self.config
        return config.placement.mode == "colocated" and (
            config.engine.sleep_level > 0 or config.trainer.offload != "none"
        )
