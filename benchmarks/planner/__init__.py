"""Placement of groups on engines, simulated and real."""
