"""The configuration of each command: schema, loading and generated documentation."""
