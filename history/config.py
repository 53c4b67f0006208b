"""The base of every configuration class, and the configuration of the history.

Configuration is data: frozen, typed, complete. Unknown keys are refused by every class; the
launcher turns that refusal into an error that names the nearest known key.
"""

from pydantic import BaseModel, ConfigDict, Field


class Config(BaseModel):
    """Frozen, strict about unknown keys; the docstring under a field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class HistoryConfig(Config):
    """What is remembered of finished responses, and how engines draft from it."""

    record_traces: bool = True
    """Write every training response's token ids to `traces/` in the run directory (jsonl)."""
    drafts: bool = True
    """Engines draft from what their prompts produced before, and verify exactly. A deterministic run never drafts."""
    max_draft_tokens: int = Field(default=16, gt=0, le=128)
    """Longest draft of one request in one forward; how much of it is used is decided by price, forward by forward."""
    stock_engines: tuple[int, ...] = ()
    """Numbers of engines that run without any speculation, for comparison."""
    num_shards: int = Field(default=1, gt=0)
    """Actors that own the history, each a share of the prompts."""
    budget_bytes: int = Field(default=2 << 30, gt=0)
    """Most bytes of tokens that all shards together remember; beyond it the least valuable prompts are forgotten."""
    kept_steps: int = Field(default=1, gt=0)
    """Visits of a prompt whose responses are kept; the last one is what counts, older ones add nothing."""
    warm_start: str = ""
    """History of another run to begin with: a `history` folder of a checkpoint, or a jsonl file (or folder) of traces.
    Refused if it was made with another tokenizer."""
