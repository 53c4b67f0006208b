"""Checks of a configuration before anything starts."""
