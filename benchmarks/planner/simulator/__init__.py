"""An event-driven model of engines and a trainer, around the product's own planner."""
