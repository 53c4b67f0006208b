"""A proposer that drafts whatever the history offers, whether it pays or not: tests want rejections."""

from rollout.worker.proposer import HistoryProposer


class EagerProposer(HistoryProposer):
    """Ours in everything but the price."""

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
        """Prices are not asked for."""
