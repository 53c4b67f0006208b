"""Learning curves of the example: quickstart, mismatch, ablation and soak."""
