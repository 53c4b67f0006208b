"""Forecasts, placement policies, admission, dispatch and migration of groups; no I/O."""
