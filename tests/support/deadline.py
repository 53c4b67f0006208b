"""How long tests wait for anything: a dead man's switch, never a statement about the speed of a machine."""

DEADLINE_S = 3600.0
