"""The engine process of `benchmarks.rollout`: reads jobs from stdin, one JSON line each, and answers on stdout.

A job names a file of recorded responses to decode in one batch, and a file with the history of their prompts. The
method gets the history in its own form before the clock starts. A job with pauses reports before it decodes and after
every slice, and continues when it reads the next line. In a job with a seed the model samples its own responses: only
the prompts of the traces are used, and the responses are written to a file.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TextIO

from benchmarks.drafting.baselines import arctic
from benchmarks.rollout.peer_proposer import PeerDrafter, PeerProposer
from benchmarks.rollout.traced_engine import Speculation, TracedEngine
from history.store.traces import Trace, read_traces
from history.types import PastResponse, prompt_key
from rollout.config import EngineConfig
from rollout.engine.spec import DraftSpec, EngineSpec
from rollout.types import SamplingSpec

MAX_DRAFT_TOKENS = 16
METHODS = ("stock", "ngram", "suffix", "histospec_paper", "histospec_released", "ours")
PEERS = {"histospec_paper": "HistoSpecPaper", "histospec_released": "HistoSpecReleased"}
"""Classes of `benchmarks.drafting.baselines.histospec`."""
_PEER = {"method": "custom_class", "model": f"{PeerProposer.__module__}.{PeerProposer.__name__}"}
SPECULATIONS: dict[str, Speculation] = {
    # settings of vLLM's documentation: five tokens after a match of two to four
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": MAX_DRAFT_TOKENS},
    # their largest windows
    "histospec_paper": {**_PEER, "num_speculative_tokens": 32},
    "histospec_released": {**_PEER, "num_speculative_tokens": 16},
}


def serve(method: str, spec: EngineSpec, changes: Speculation, *, own_sampler: bool) -> None:
    """Start the engine and answer jobs until stdin ends.

    Args:
        method: one of METHODS.
        spec: the specification as in the product.
        changes: settings of the method's speculation that replace those of `SPECULATIONS`.
        own_sampler: whether the product's sampler samples for stock and peers too; else vLLM's.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    speculation = {**SPECULATIONS[method], **changes} if method in SPECULATIONS else None
    engine = TracedEngine(spec, speculation, own_sampler=own_sampler or method == "ours")
    if method in PEERS:
        # imported after the engine has started, because it imports numba
        _drafter(engine).peer = getattr(
            importlib.import_module("benchmarks.drafting.baselines.histospec"), PEERS[method]
        )()
    _answer(answers, {"ready": method})

    def pause() -> None:
        _answer(answers, {"paused": method})
        sys.stdin.readline()

    for line in sys.stdin:
        job = json.loads(line)
        remember(method, engine, list(read_traces(Path(job["history"]))), spec)
        traces = list(read_traces(Path(job["traces"])))
        if "seed" not in job:
            _answer(answers, asdict(engine.decode(traces, pause if job.get("pauses") else None)))
            continue
        sampling = SamplingSpec(temperature=job["temperature"], max_response_tokens=job["max_tokens"])
        figures, responses = engine.sample(traces, sampling, job["seed"])
        Path(job["responses"]).write_text(json.dumps(responses), encoding="utf-8")
        _answer(answers, asdict(figures))


def _answer(answers: TextIO, answer: Mapping[str, object]) -> None:
    print(json.dumps(answer), file=answers)


def remember(method: str, engine: TracedEngine, history: Sequence[Trace], spec: EngineSpec) -> None:
    """Give a method its history: traces of one visit, ordered by prompt."""
    visits = {key: list(visit_traces) for key, visit_traces in groupby(history, key=lambda trace: trace.prompt_id)}
    if method == "ours" and spec.drafts is not None:
        publish_segments(visits, Path(spec.drafts.segments_dir))
    elif method == "suffix":
        cache = engine.worker.model_runner.drafter.suffix_cache
        for trace in history:
            request = f"past-{trace.prompt_id}-{trace.sample}"
            cache.start_request(request, trace.prompt_ids)
            cache.add_active_response(request, trace.response_ids)
            cache.stop_request(request)
    elif method in PEERS:
        drafter = _drafter(engine)
        drafter.traces = {prompt_key(prompt_id): visit[0] for prompt_id, visit in visits.items()}
        assert drafter.peer is not None
        for prompt_id, visit in visits.items():
            drafter.peer.remember(prompt_id, visit)


def publish_segments(visits: dict[str, list[Trace]], directory: Path) -> None:
    """Build and write the segments, as a node's reader does."""
    from history.index.segment import build_segment, write_segment

    for prompt_id, visit in visits.items():
        past = [
            PastResponse(token_ids=trace.response_ids, step=trace.step, sample=trace.sample, reward=trace.reward)
            for trace in visit
        ]
        write_segment(directory, build_segment(prompt_key(prompt_id), 1, past))


def _drafter(engine: TracedEngine) -> PeerDrafter:
    proposer = engine.worker.model_runner.drafter
    assert isinstance(proposer, PeerProposer)
    return proposer.drafter


def engine_spec(
    method: str, *, model: Path, segments_dir: Path, max_model_len: int, max_num_seqs: int, trained: bool
) -> EngineSpec:
    """The product's specification of an engine; for a peer, its speculation is replaced afterwards."""
    drafts = DraftSpec(max_draft_tokens=MAX_DRAFT_TOKENS, segments_dir=str(segments_dir))
    return EngineSpec(
        engine_id=0,
        run_id="benchmark",
        config=EngineConfig(max_num_seqs=max_num_seqs, kv_cache_bytes=640 << 20),
        directory=str(model),
        max_model_len=max_model_len,
        load_from_directory=trained,
        drafts=None if method in ("stock", "ngram", "suffix") else drafts,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--segments", type=Path, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--trained", action="store_true", help="load the weights in the model's directory")
    parser.add_argument("--speculation", type=json.loads, default={}, help="other settings of the method, as JSON")
    parser.add_argument("--own-sampler", action="store_true", help="the product's sampler for stock and peers too")
    options = parser.parse_args(argv)
    if options.method == "suffix" and arctic.load(arctic.DIRECTORY) is None:
        raise SystemExit("suffix is not built; run `python -m benchmarks.drafting.baselines.arctic`")
    spec = engine_spec(
        options.method,
        model=options.model,
        segments_dir=options.segments,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        trained=options.trained,
    )
    serve(options.method, spec, options.speculation, own_sampler=options.own_sampler)
    return 0


if __name__ == "__main__":
    sys.exit(main())
