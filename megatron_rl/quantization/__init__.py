"""8-bit codes of weights: formats, FP8, and FP8 parameters."""
