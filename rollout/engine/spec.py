"""The specification of one engine. Pure: the controller builds it without vLLM."""

from dataclasses import dataclass, replace

from history.types import folder_of_node
from rollout.config import EngineConfig, InFlight


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """How an engine drafts from the history of its prompts."""

    max_draft_tokens: int
    """Longest draft of one request in one forward."""
    segments_dir: str = ""
    """Folder in which the node's reader publishes histories, one file per prompt. Empty: only live text is used.

    The controller names it without the node, which the engine's actor adds (`EngineSpec.on_node`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """All arguments of one engine."""

    engine_id: int
    run_id: str
    """The engine refuses manifests of other runs."""
    config: EngineConfig
    directory: str
    """A Hugging Face model directory; only `config.json` (and the end-of-sequence ids) are read."""
    max_model_len: int
    """Prompt and response tokens of the longest request."""
    load_from_directory: bool = False
    """Load the weights of the directory, in their format, and serve them as version 0."""
    in_flight: InFlight = "recompute"
    """`recompute`: running responses continue after their keys and values are recomputed. `keep_kv`: they continue at
    once, with the keys and values of the old weights. `drain`: the publisher calls `EngineWeights.drain` first."""
    drafts: DraftSpec | None = None
    """None is a baseline engine: vLLM without speculation."""

    def on_node(self, node_id: str) -> "EngineSpec":
        """The specification of an engine that runs on a node, by Ray's id."""
        if self.drafts is None or not self.drafts.segments_dir:
            return self
        folder = folder_of_node(self.drafts.segments_dir, node_id)
        return replace(self, drafts=replace(self.drafts, segments_dir=folder))

    @property
    def name(self) -> str:
        """The engine's name in errors and logs."""
        return f"engine {self.engine_id}"
