"""Everything that only engines on CPUs need."""
