"""Response lengths of prompts, and the share of tokens that repeats between visits."""
