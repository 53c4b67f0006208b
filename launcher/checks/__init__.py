"""Checks of a configuration and of the machine before any process starts."""
