"""Report and timeline of a run, generated from its run directory."""
