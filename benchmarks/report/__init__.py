"""How long the pages of a large run take to open."""
