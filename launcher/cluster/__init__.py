"""Nodes of a command: their facts, Ray on them, the placement of processes, and the SLURM job."""
