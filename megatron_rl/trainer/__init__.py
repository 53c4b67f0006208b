"""One trainer rank, and the group of all ranks."""
