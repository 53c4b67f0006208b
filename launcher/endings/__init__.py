"""Endings of commands: their kinds, exit codes and the screen that explains a failure."""
