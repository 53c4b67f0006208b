"""Code that only engines on CPUs need."""
