"""The engine actor around vLLM's AsyncLLM."""
