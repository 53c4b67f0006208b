"""Command line, configuration files, machine checks, run directories and reports.

Nothing under `launcher/` imports torch, and `megatron-rl --help` imports none of torch, ray, vllm or megatron.
"""
