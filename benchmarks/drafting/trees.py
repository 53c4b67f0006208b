"""Tokens per forward with chains and with trees of drafts: `python -m benchmarks.drafting.trees --json OUT [--quick]`.

vLLM verifies one chain of draft tokens per request. The tree holds all candidates of the drafter (history, live text,
cursor, realigned cursor), and verification keeps the longest correct one. The chain is the candidate that the drafter
chooses. Both use the same index and the same generated traces (`benchmarks.drafting.traces`).

Rows: tokens per forward, and draft tokens verified per request and forward.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.drafting.traces import generate
from benchmarks.harness.record import Row, arguments, write
from history.drafting.drafter import Drafter
from history.index.segment import build_segment, write_segment
from history.store.traces import Trace
from history.types import PastResponse, prompt_key

K = 16
REUSE = (0.93, 0.87, 0.76)
CHAINS = ((16, 0.1), (16, 0.02), (32, 0.1), (32, 0.03))
"""(largest draft in tokens, least survival) of the measured chains."""

Chains = list[list[int]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure trees and chains and write the record."""
    options = arguments("Tokens per forward with chains and with trees of drafts.").parse_args(argv)
    num_prompts, num_tokens = (2, 500) if options.quick else (16, 2000)
    rows: list[Row] = []
    for reuse in REUSE:
        traces = generate(reuse=reuse, num_tokens=num_tokens, num_prompts=num_prompts).traces
        for k, threshold, tree in ((K, 0.1, True), *((k, threshold, False) for k, threshold in CHAINS)):
            per_forward, verified = decode(traces, k=k, threshold=threshold, tree=tree)
            rows.append({
                "reuse": reuse, "shape": "tree" if tree else "chain", "max_draft_tokens": k, "threshold": threshold,
                "tokens_per_forward": per_forward, "verified_per_row": verified,
            })  # fmt: skip
            print(rows[-1])
    write(options.json, rows=rows, not_measured=["an engine that verifies trees: vLLM does not"])
    return 0


def decode(traces: Sequence[Trace], *, k: int, threshold: float, tree: bool) -> tuple[float, float]:
    """Decode the second epoch with the first as history; tokens and verified draft tokens per request and forward."""
    with tempfile.TemporaryDirectory() as folder:
        for prompt_id in dict.fromkeys(trace.prompt_id for trace in traces):
            past = [trace for trace in traces if trace.prompt_id == prompt_id and trace.step == 0]
            responses = [PastResponse(token_ids=t.response_ids, step=0, sample=t.sample) for t in past]
            write_segment(Path(folder), build_segment(prompt_key(prompt_id), 1, responses))
        drafter = Drafter(max_draft_tokens=k, segments_dir=folder, threshold=threshold)
        return _decode([trace for trace in traces if trace.step == 1], drafter, k=k, tree=tree)


def _decode(traces: Sequence[Trace], drafter: Drafter, *, k: int, tree: bool) -> tuple[float, float]:
    texts = [[*trace.prompt_ids.tolist(), *trace.response_ids.tolist()] for trace in traces]
    known = np.array([len(trace.prompt_ids) + 1 for trace in traces], dtype=np.int32)
    token_ids = np.zeros((len(traces), max(map(len, texts))), dtype=np.int32)
    draft_rows = np.array([
        drafter.open(
            prompt_key=prompt_key(trace.prompt_id), prompt_length=len(trace.prompt_ids), max_length=len(text)
        )
        for trace, text in zip(traces, texts, strict=True)
    ])  # fmt: skip
    for row, text in enumerate(texts):
        token_ids[row, : known[row]] = text[: known[row]]
    forwards, emitted, verified = 0, 0, 0
    while (draft_rows >= 0).any():
        drafts = drafter.propose(draft_rows, token_ids, known, np.full(len(draft_rows), k, dtype=np.int32))
        for row in np.flatnonzero(draft_rows >= 0).tolist():
            chains = candidates(drafter, int(draft_rows[row])) if tree else [drafts[row]]
            start, end = int(known[row]), len(texts[row])
            stop = min(start + 1 + max(lead(chain, texts[row][start:]) for chain in chains), end)
            forwards, emitted, verified = forwards + 1, emitted + stop - start, verified + num_nodes(chains)
            token_ids[row, start:stop] = texts[row][start:stop]
            known[row] = stop
            if stop == end:
                drafter.close(int(draft_rows[row]))
                draft_rows[row] = -1
    return emitted / forwards, verified / forwards


def candidates(drafter: Drafter, draft_row: int) -> Chains:
    """All candidate chains of the drafter for a draft row."""
    state = drafter._state
    pairs = zip(state.chains[draft_row].tolist(), state.lengths[draft_row].tolist(), strict=True)
    return [chain[:length] for chain, length in pairs]


def lead(chain: Sequence[int], answer: Sequence[int]) -> int:
    """Number of leading tokens of a chain that are correct."""
    count = 0
    while count < min(len(chain), len(answer)) and chain[count] == answer[count]:
        count += 1
    return count


def num_nodes(chains: Chains) -> int:
    """Number of nodes of the tree of these chains, without the root."""
    return len({tuple(chain[: i + 1]) for chain in chains for i in range(len(chain))})


if __name__ == "__main__":
    sys.exit(main())
