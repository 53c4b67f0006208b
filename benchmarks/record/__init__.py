"""`python -m benchmarks.record`: looks after the committed records."""
