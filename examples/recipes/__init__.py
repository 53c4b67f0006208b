"""Recipes for runs on GPUs, the plan of each, and a converter of their data."""
