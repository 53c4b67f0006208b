"""The methods of `benchmarks.drafting`, and the tokens per forward of each on the same traces.

Every method decodes the same responses; its drafts change only the number of forwards.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.drafting.baselines.arctic import Arctic, Suffixes
from benchmarks.drafting.baselines.histospec import HistoSpecPaper, HistoSpecReleased
from benchmarks.drafting.baselines.ngram import Ngram, vllm_search
from benchmarks.drafting.baselines.product import Product
from benchmarks.drafting.baselines.replay import Method, Outcome, Replay, decode
from benchmarks.harness.record import Row
from history.drafting.forward_cost import ForwardCostModel
from history.store.traces import Trace

K = 16
"""Largest draft of a request, for methods that do not choose it themselves; also the product's default."""
PAPER_K = 32
SUFFIX_K = 24
"""vLLM's default for `suffix`: the depth of its trees."""
MAX_BATCH = 256
OURS, NGRAM, PAPER, RELEASED = "ours", "vLLM ngram", "HistoSpec, paper", "HistoSpec, released"
OURS_FIXED = "ours, threshold 0.1"
OURS_ALL = "ours, threshold 0"
"""The product, drafting every token that it has a candidate for; for comparison with peers that draft as freely."""
ARCTIC = "Arctic, vLLM's defaults"
ARCTIC_ONE_TREE = "Arctic, one tree a prompt, factor 4"
ARCTIC_BEST = "Arctic, best setting"
GRID = {
    ARCTIC: {"depth": 24, "factor": 1.0, "min_probability": 0.1},
    ARCTIC_ONE_TREE: {"depth": 24, "factor": 4.0, "min_probability": 0.1, "per_prompt": True},
    "Arctic, factor 4": {"depth": 24, "factor": 4.0, "min_probability": 0.1},
    "Arctic, one tree a prompt": {"depth": 24, "factor": 1.0, "min_probability": 0.1, "per_prompt": True},
    "Arctic, one tree a prompt, depth 64, factor 4": {
        "depth": 64,
        "factor": 4.0,
        "min_probability": 0.1,
        "per_prompt": True,
    },
    "Arctic, one tree a prompt, factor 4, p 0.03": {
        "depth": 24,
        "factor": 4.0,
        "min_probability": 0.03,
        "per_prompt": True,
    },
    "Arctic, factor 8": {"depth": 24, "factor": 8.0, "min_probability": 0.1},
    "Arctic, one tree a prompt, factor 8, p 0.03": {
        "depth": 24,
        "factor": 8.0,
        "min_probability": 0.03,
        "per_prompt": True,
    },
    "Arctic, one tree a prompt, depth 64, factor 16, p 0.03": {
        "depth": 64,
        "factor": 16.0,
        "min_probability": 0.03,
        "per_prompt": True,
    },
    "Arctic, one tree a prompt, factor 8, p 0.2": {
        "depth": 24,
        "factor": 8.0,
        "min_probability": 0.2,
        "per_prompt": True,
    },
}
"""Settings of Arctic's cache. By default, as in vLLM, one tree serves all prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A method with its settings."""

    name: str
    make: Callable[[], Method]
    max_draft_tokens: int = K

    @property
    def is_arctic(self) -> bool:
        """Whether the method is a setting of Arctic."""
        return self.name in GRID


def ours(
    work: Path, *, threshold: float = 0.1, cost_model: ForwardCostModel | None = None, k: int = K, num_threads: int = 1
) -> Product:
    """The product's drafter with segments in a new folder of `work`."""
    folder = work / f"segments-{len(list(work.iterdir()))}"
    folder.mkdir()
    return Product(folder, max_draft_tokens=k, threshold=threshold, cost_model=cost_model, num_threads=num_threads)


def contestants(work: Path, arctic: Suffixes | None, *, cap: int | None = None) -> list[Contestant]:
    """The product first, then its peers; without Arctic if it is not built.

    `cap` is the largest draft of all methods. Without it HistoSpec's paper has its own, Arctic's default that of vLLM,
    and all other methods have `K`.
    """
    search, k = vllm_search(), cap or K
    methods = [
        Contestant(name=OURS, make=lambda: ours(work, k=k), max_draft_tokens=k),
        Contestant(name=OURS_ALL, make=lambda: ours(work, threshold=0.0, k=k), max_draft_tokens=k),
        Contestant(name=NGRAM, make=lambda: Ngram(search, max_draft_tokens=k), max_draft_tokens=k),
        Contestant(name=PAPER, make=HistoSpecPaper, max_draft_tokens=cap or PAPER_K),
        Contestant(name=RELEASED, make=HistoSpecReleased, max_draft_tokens=k),
    ]
    if arctic is not None:
        for name, settings in GRID.items():
            most = cap or (SUFFIX_K if name == ARCTIC else K)
            methods.append(Contestant(name=name, make=_arctic(arctic, settings, most), max_draft_tokens=most))
    return methods


def _arctic(module: Suffixes, settings: dict[str, float], max_draft_tokens: int) -> Callable[[], Method]:
    def make() -> Method:
        return Arctic(
            module,
            max_draft_tokens=max_draft_tokens,
            depth=int(settings["depth"]),
            factor=settings["factor"],
            min_probability=settings["min_probability"],
            per_prompt=bool(settings.get("per_prompt", False)),
        )

    return make


def visits(traces: Sequence[Trace]) -> list[list[Trace]]:
    """The first visits of all prompts, the second visits, and so on; the steps of a visit may differ."""
    steps: dict[str, list[int]] = {}
    for trace in sorted(traces, key=lambda trace: trace.step):
        of_prompt = steps.setdefault(trace.prompt_id, [])
        if trace.step not in of_prompt:
            of_prompt.append(trace.step)
    by_visit: list[list[Trace]] = [[] for _ in range(max(len(of_prompt) for of_prompt in steps.values()))]
    for trace in sorted(traces, key=lambda trace: (trace.step, trace.prompt_id, trace.sample)):
        by_visit[steps[trace.prompt_id].index(trace.step)].append(trace)
    return by_visit


def remember(method: Method, visit: Sequence[Trace]) -> None:
    """Add a visit of many prompts to a method's history."""
    for prompt_id, responses in by_prompt(visit):
        method.remember(prompt_id, responses)


def by_prompt(visit: Sequence[Trace]) -> Iterator[tuple[str, list[Trace]]]:
    """Each prompt's responses."""
    ordered = sorted(visit, key=lambda trace: (trace.prompt_id, trace.sample))
    for prompt_id, responses in itertools.groupby(ordered, key=lambda trace: trace.prompt_id):
        yield prompt_id, list(responses)


def replay_of(method: Method, visit: Sequence[Trace], *, max_draft_tokens: int, batch: int = MAX_BATCH) -> Replay:
    """A replay whose requests may become half as long again as the longest response."""
    return Replay(
        method,
        visit,
        batch=min(batch, len(visit)),
        max_draft_tokens=max_draft_tokens,
        max_response_tokens=max(len(trace.response_ids) for trace in visit) * 3 // 2,
    )


def decode_visits(contestant: Contestant, epochs: Sequence[Sequence[Trace]], *, first: int = 0) -> Iterator[Outcome]:
    """Decode the visits from `first` on with one method; earlier visits are only added to its history."""
    method = contestant.make()
    for number, visit in enumerate(epochs):
        if number >= first:
            outcome = decode(replay_of(method, visit, max_draft_tokens=contestant.max_draft_tokens))
            if isinstance(method, Product):
                error = method.drain().calibration_error()
                outcome = replace(outcome, calibration_error=error)
            yield outcome
        if number + 1 < len(epochs):
            remember(method, visit)


def quality_row(case: str, name: str, visit: int, outcome: Outcome) -> Row:
    """The `tokens` row of a replay."""
    row: dict[str, str | int | float | bool] = {
        "what": "tokens",
        "case": case,
        "method": name,
        "visit": visit,
        "tokens_per_forward": round(outcome.tokens_per_forward, 4),
        "drafted": outcome.num_drafted,
        "accepted": outcome.num_accepted,
        "emitted": outcome.num_emitted,
    }
    if outcome.calibration_error is not None:
        row["calibration_error"] = round(outcome.calibration_error, 4)
    return row


def named_best(row: Row, *, is_best: bool) -> Iterator[Row]:
    """The row, and its copy as that of Arctic's best setting; settings other than the default have the copy only."""
    if row["method"] == ARCTIC or row["method"] not in GRID:
        yield row
    if is_best:
        yield {**row, "method": ARCTIC_BEST, "setting": str(row["method"])}
