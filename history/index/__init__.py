"""The frozen text index of one prompt: suffix array, segment file and search."""
