"""Response lengths of prompts, and how well they repeat."""
