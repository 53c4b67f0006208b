"""A proposer that always drafts, even if it does not pay, because tests need rejections."""

from rollout.worker.proposer import HistoryProposer


class EagerProposer(HistoryProposer):
    """The product's proposer without costs."""

    def make_drafter(self, cost_model):
        from history.drafting.drafter import Drafter

        return Drafter(
            max_draft_tokens=self._max_draft_tokens,
            segments_dir=self._segments_dir,
            cost_model=None,
            threshold=0.01,
            max_model_len=self._runner.max_model_len,
        )

    def observe(self, forward):
        """Ignores forwards, because no costs are learned."""
