"""Everything that only trainers on CPUs need."""
