"""The training loop, its phases and the publishing of weights."""
