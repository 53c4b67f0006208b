"""How much sooner a model is trained, from launch to a fixed accuracy, against stacks that a user knows."""
