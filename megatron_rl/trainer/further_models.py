"""The models of a trainer rank beside the policy: a reference policy and a critic.

SPMD: all ranks of the trainer call every method together with the micro batches of their data-parallel rank, before the
first update of a step. Results exist on the last pipeline stage; other stages get an empty list.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.model.build import PolicyModel
from megatron_rl.stages import Column
from megatron_rl.trainer.critic import Critic
from megatron_rl.trainer.reference import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherModels:
    """The models that the functions of the algorithm need; None where none needs it."""

    reference: Reference | None = None
    critic: Critic | None = None

    def check(self, needed: frozenset[Column]) -> None:
        """Raises RuntimeError if a needed model is missing."""
        given = {"ref": self.reference is not None, "values": self.critic is not None}
        for column in sorted(needed):
            if not given[column]:
                raise RuntimeError(f"the algorithm needs the column `{column}`, but the trainer has no model of it")

    @property
    def frozen(self) -> Sequence[PolicyModel]:
        """Models on the device that do not learn."""
        return () if self.reference is None else self.reference.models


POLICY_ONLY = FurtherModels()
