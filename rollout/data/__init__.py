"""Prompts: rows of files, their order and the tokenizer."""
