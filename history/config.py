"""The base of every configuration class, and the configuration of the history.

Configuration is data: frozen, typed, complete. Unknown keys are refused by every class; the
launcher turns that refusal into an error that names the nearest known key.
"""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Frozen, strict about unknown keys; the docstring under a field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class HistoryConfig(Config):
    """What is remembered of finished responses."""

    record_traces: bool = True
    """Write every training response's token ids to `traces/` in the run directory (jsonl)."""
