"""Machines, configuration files, the command line, tracking: everything that surrounds a run.

Must not know tensors: nothing under `launcher/` imports torch, and `megatron-rl --help` imports none of torch, ray,
vllm or megatron.
"""
