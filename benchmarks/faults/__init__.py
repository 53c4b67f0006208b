"""Kills and freezes each kind of process of a run in each of its phases."""
