"""Checks of `megatron-rl doctor`, a file for each subject: what a careful engineer checks before a long run."""
