"""Going on after a loss: engines and trainers that start again, nodes that others replace."""
