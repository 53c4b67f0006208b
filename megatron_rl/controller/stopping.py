"""A run that ends early on request, or to start its engines anew, with a checkpoint of what it has learned."""


class StopRequestedError(Exception):
    """The run has stopped on request; its newest checkpoint is of `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped on request after step {step}")
        self.step = step


class EngineFormatError(Exception):
    """Engines must start again with other formats of their weights; the newest checkpoint is of `step`."""

    def __init__(self, step: int, *, num_lost_nodes: int) -> None:
        super().__init__(f"engines need other weight formats after step {step}")
        self.step = step
        self.num_lost_nodes = num_lost_nodes
        """Nodes that the run has lost; its first nodes are then no place for a new start."""


class RolloutInterruptedError(Exception):
    """Raised by the progress callback of a rollout to leave it; the step will be sampled again."""
