"""What vLLM has built from a model's configuration, as far as no tensor's shape shows it. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """Numbers that change what a model computes, read from an engine's built layers; equal in all layers."""

    head_dim: int
    """Size of one attention head."""
    rotary_dim: int
    """Leading numbers of a head that rotary embeddings turn."""
    rope_type: str
    """`default` or `llama3`; the name of vLLM's class for another kind."""
    rope_theta: float
    """Rotary base."""
    rope_scaling: tuple[float, float, float, int] | None
    """Of `llama3`: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings; None otherwise."""
    rms_norm_eps: float
    sliding_window: int | None
    """Tokens that attention sees; None if it sees all."""
    logit_scale: float
    """Factor of all logits."""
    tie_word_embeddings: bool
    """Whether the output layer is the embedding."""
