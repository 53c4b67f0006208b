"""`megatron-rl doctor`: checks of nodes, data and, on request, of the log-probabilities of trainer and engines."""
