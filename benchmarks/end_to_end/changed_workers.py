"""Worker and proposer of changed engines; vLLM imports them by name (`benchmarks.end_to_end.changed_engine`).

Each writes `SIGN` to the engine's log when it is in use, so that no run counts as changed that was not.
"""

from typing import TYPE_CHECKING

from benchmarks.end_to_end.changed_engine import SIGN
from rollout.worker.proposer import HistoryProposer, RowDrafter
from rollout.worker.worker import Worker

if TYPE_CHECKING:
    from history.drafting.forward_cost import ForwardCostModel


class StockSamplerWorker(Worker):
    """The product's worker with vLLM's own sampler."""

    def compile_or_warm_up_model(self) -> object:
        """Remove the product's sampler again."""
        done = super().compile_or_warm_up_model()
        del self.model_runner._sample
        print(SIGN, flush=True)
        return done


class RinglessProposer(HistoryProposer):
    """The product's proposer without the ring."""

    def make_drafter(self, cost_model: "ForwardCostModel") -> RowDrafter:
        """The product's drafter; it never searches the ring."""
        drafter = super().make_drafter(cost_model)
        _close(drafter)
        print(SIGN, flush=True)
        return drafter


def _close(drafter: RowDrafter) -> None:
    # numba may not be imported before the CPU worker has initialised
    from history.drafting.forward import RING_TRIAL
    from history.drafting.ring_use import PAYS

    state, draft = drafter._state, drafter._draft  # type: ignore[attr-defined]
    state.uses_ring[0], state.ring_trials[PAYS] = 0, 0
    drafter._draft = lambda *request: draft(*request[:-1], request[-1] & ~RING_TRIAL)  # type: ignore[attr-defined]
