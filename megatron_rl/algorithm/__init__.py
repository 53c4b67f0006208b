"""Pure functions of tokens: advantages, losses, correction and mismatch."""
