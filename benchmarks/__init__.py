"""Commands that measure: `python -m benchmarks.NAME --json OUT [--quick]`; each writes one JSON record."""
