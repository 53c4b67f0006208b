"""Reports and timelines made from a run directory."""
