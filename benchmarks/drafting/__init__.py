"""Drafting on recorded responses: acceptance, cost and bounds, against other drafters."""
