"""Our code inside a vLLM worker process: sampler, proposer and receiver of weights."""
