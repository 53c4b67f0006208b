"""Chains of additions and subtractions: a task for a model that trains on two cores."""
