"""Prompts in, scored responses out: vLLM engines, their weights' wire format, rewards, the planner.

Knows vLLM (in the few files that adapt it); must not know Megatron.
"""
