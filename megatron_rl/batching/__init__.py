"""From scored groups to batches that are balanced over trainer ranks."""
