"""Learning curves of the example: quickstart, mismatch, algorithms, guard and soak."""
