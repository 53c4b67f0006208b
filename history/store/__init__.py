"""Stores finished responses in memory, saves them with checkpoints and serves them to engines."""
