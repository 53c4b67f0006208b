"""Everything that a run writes while it runs."""
