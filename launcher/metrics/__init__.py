"""The metrics of a run: one registry of names, the page that documents them, the panels that show them."""
