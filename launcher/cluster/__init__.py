"""Node facts, placement, processes and engine restarts."""
