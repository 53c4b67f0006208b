"""Limit of every wait in a test, in seconds: it ends hung tests and does not depend on the speed of a machine."""

DEADLINE_S = 1500.0
