"""8-bit codes of weights: formats, FP8, and parameters that are FP8 themselves."""
