"""Steps of large models on hundreds of GPUs, on paper: `python -m benchmarks.at_scale`."""
