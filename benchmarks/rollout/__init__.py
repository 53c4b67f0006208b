"""Real vLLM engines: drafting, sampling and the time of a forward."""
