"""What the prompts produced before: tokens, lengths, acceptance.

The leftmost package. It knows nothing of models or engines and never imports torch, so that every
other room, the planner and the engine's decode loop included, may lean on it.
"""
