"""The trainer's side of the ring: Megatron models, losses, rollout correction, publishing, the controller.

Knows Megatron-Core and Transformer Engine; must not know machines or SLURM.
"""
