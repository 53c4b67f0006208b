"""A model of four layers learns to write programs that pass their tests."""
