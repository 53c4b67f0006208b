"""What the trainer asks of models beside the policy: a reference policy and a critic.

SPMD: all ranks of the trainer call every method together with the micro batches of their data-parallel rank, before the
first update of a step. Results exist on the last pipeline stage; other stages get an empty list.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_rl.stages import Column
from megatron_rl.trainer.loaded_batch import LoadedMicroBatch


class ReferenceScores(Protocol):
    """The policy that the divergence is measured from."""

    def logprobs(self, micro_batches: Sequence[LoadedMicroBatch]) -> list[torch.Tensor]:
        """Log-probabilities of every micro batch's responses, [R] float32 each, at the sampling temperature.

        A dummy has the one score of its dummy token.
        """
        ...


class Values(Protocol):
    """The critic."""

    def values(self, micro_batches: Sequence[LoadedMicroBatch]) -> list[torch.Tensor]:
        """Expected return at every response token, before it is sampled, [R] float32 each.

        A dummy has the one value of its dummy token.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherModels:
    """The models that the functions of the algorithm need; None where none needs it."""

    reference: ReferenceScores | None = None
    values: Values | None = None

    def check(self, needed: frozenset[Column]) -> None:
        """Raises RuntimeError if a needed model is missing."""
        given = {"ref": self.reference is not None, "values": self.values is not None}
        for column in sorted(needed):
            if not given[column]:
                raise RuntimeError(
                    f"the algorithm needs the column `{column}`, but the trainer was built without its model; "
                    "`launcher.checks` should have refused this configuration"
                )


POLICY_ONLY = FurtherModels()
