"""The controller's side of engines and scorers."""
