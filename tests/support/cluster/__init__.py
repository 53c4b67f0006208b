"""A real SLURM cluster of test nodes on one machine."""
