"""`python -m benchmarks.record`: checks the committed records and generates their pages."""
