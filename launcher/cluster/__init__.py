"""Nodes, placement, processes and engine restarts."""
