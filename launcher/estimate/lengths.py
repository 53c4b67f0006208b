"""Lengths of prompts and responses, as stated or as an earlier run recorded them. No torch.

A run says in `metrics.jsonl` how long its responses were on average and at most, and in `traces/` how long each was.
Without a trace, lengths follow a power law between 0 and the longest response: the share u of shortest responses ends
at longest x u^k, with k = longest / mean - 1, so that the mean is right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import numpy.typing as npt

from history.store.traces import read_traces
from launcher.errors import ConfigError
from launcher.run_dir.atomic_files import read_rows

RECENT_STEPS = 10
"""Last steps of a run whose metrics are averaged."""

MEAN_SHARE = {"prompt_tokens": 0.5, "response_tokens": 0.25}
"""Mean lengths as shares of their bounds, if neither stated nor recorded."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of samples, in tokens."""

    prompt: float
    """Mean."""
    responses: Floats
    """[N] lengths at N equally spaced quantiles, ascending."""
    tokens_per_forward: float
    """Tokens that an engine emits for a request in one forward; 1 without drafts."""
    source: str
    """Origin of the figures, for people."""

    @property
    def response(self) -> float:
        """Mean."""
        return float(self.responses.mean())

    @property
    def longest(self) -> float:
        """The longest response."""
        return float(self.responses[-1])

    def of(self, count: int) -> Floats:
        """[count] response lengths of the same distribution, ascending."""
        places = (np.arange(count) + 0.5) / count * len(self.responses) - 0.5
        return np.interp(places, np.arange(len(self.responses)), self.responses)


def stated_lengths(
    *, prompt: float, response: float, longest: float, tokens_per_forward: float, source: str = "stated"
) -> Lengths:
    """Lengths by their means and the longest response.

    Raises:
        ConfigError: the mean is not between 0 and the longest response, or fewer than one token comes from a forward.
    """
    if not 0 < response <= longest:
        raise ConfigError(
            f"--response-tokens = {response:g} must be above 0 and at most the longest response of {longest:g} tokens; "
            "correct it"
        )
    if tokens_per_forward < 1:
        raise ConfigError(
            f"--tokens-per-forward = {tokens_per_forward:g} is below 1, which holds without drafts; raise it"
        )
    count = 1024
    shares = (np.arange(count) + 0.5) / count
    shape = shares ** (longest / response - 1)
    responses = np.minimum(longest, shape * response / shape.mean())
    return Lengths(prompt=prompt, responses=responses, tokens_per_forward=tokens_per_forward, source=source)


def recorded_lengths(path: Path) -> Lengths:
    """Lengths of an earlier run: its directory, its `metrics.jsonl`, or a file or folder of traces.

    Raises:
        ConfigError: there are no such figures.
    """
    if (path / "metrics.jsonl").exists():
        return _from_metrics(path / "metrics.jsonl")
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise ConfigError(f"--lengths = {path}: no run directory, metrics or traces; name one of them")
    if files[0].name == "metrics.jsonl":
        return _from_metrics(files[0])
    return _from_traces(files, path)


def _from_metrics(path: Path) -> Lengths:
    rows = [row for row in read_rows(path) if "response_length/mean" in row][-RECENT_STEPS:]
    if not rows:
        raise ConfigError(f"--lengths = {path}: holds no step with response_length/mean; name a run that has trained")
    # 0, in rows of earlier versions, and absence: no token was counted
    decoding = [row for row in rows if row.get("history/tokens_per_forward")]
    return stated_lengths(
        prompt=_mean(rows, "prompt_length/mean"),
        response=_mean(rows, "response_length/mean"),
        longest=max(float(str(row["response_length/max"])) for row in rows),
        tokens_per_forward=max(1.0, _mean(decoding, "history/tokens_per_forward")) if decoding else 1.0,
        source=f"the last {len(rows)} steps in {path}",
    )


def _mean(rows: Sequence[Mapping[str, object]], name: str) -> float:
    return fmean(float(str(row[name])) if name in row else 0.0 for row in rows)


def _from_traces(files: Sequence[Path], path: Path) -> Lengths:
    try:
        lengths = [(len(trace.prompt_ids), len(trace.response_ids)) for file in files for trace in read_traces(file)]
    except ValueError as error:
        raise ConfigError(f"--lengths: {error}") from None
    if not lengths:
        raise ConfigError(f"--lengths = {path}: holds no trace; name a run that has sampled")
    prompts, responses = zip(*lengths, strict=True)
    return Lengths(
        prompt=fmean(prompts),
        responses=np.sort(np.asarray(responses, dtype=np.float64)),
        tokens_per_forward=1.0,
        source=f"{len(lengths)} responses in {path}",
    )
