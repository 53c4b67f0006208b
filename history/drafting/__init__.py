"""The drafter as it runs inside an engine: candidates, acceptance, draft length and forward cost."""
