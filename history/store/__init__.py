"""Finished responses: kept in memory, saved with checkpoints and served to engines."""
