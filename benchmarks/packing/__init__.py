"""Packing of samples into micro batches, against verl's balancing."""
