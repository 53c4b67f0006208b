"""Chains of additions and subtractions: a model small enough to learn on two cores."""
