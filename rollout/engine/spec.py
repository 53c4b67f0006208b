"""What one engine is made from. Pure: the controller makes it without vLLM."""

from dataclasses import dataclass

from rollout.config import EngineConfig, InFlight


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """How an engine drafts from the history of its prompts."""

    max_draft_tokens: int
    """Longest draft of one request in one forward."""
    segments_dir: str = ""
    """Where the node's reader publishes histories, one file per prompt. Empty: drafts come from live text only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Everything one engine is made from."""

    engine_id: int
    run_id: str
    """Manifests of another run are refused."""
    config: EngineConfig
    directory: str
    """A Hugging Face model directory; only `config.json` (and the end-of-sequence ids) are read."""
    max_model_len: int
    """Prompt and response tokens of the longest request."""
    load_from_directory: bool = False
    """Load the directory's own weights, in the format they are in, and serve them as version 0."""
    in_flight: InFlight = "recompute"
    """`recompute`: running responses go on when their keys and values have been computed anew. `keep_kv`: they go on at
    once, with the keys and values of the old weights. `drain` is the publisher's to ask for (`EngineWeights.drain`)."""
    drafts: DraftSpec | None = None
    """None is a stock engine: vLLM without any speculation."""

    @property
    def name(self) -> str:
        """How errors and logs call this engine."""
        return f"engine {self.engine_id}"
