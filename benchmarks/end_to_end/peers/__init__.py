"""Stacks that a user would pick instead, each a program that runs in an environment of its own."""
