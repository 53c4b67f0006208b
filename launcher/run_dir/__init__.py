"""Files that a run writes: metrics, samples, traces, checkpoints, wandb, console lines."""
