import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.drafting.baselines import arctic
from benchmarks.drafting.baselines.histospec import HistoSpec, HistoSpecPaper, HistoSpecReleased
from benchmarks.drafting.baselines.ngram import Ngram, vllm_search
from benchmarks.drafting.baselines.product import Product
from benchmarks.drafting.baselines.replay import Method, Replay, decode
from tests.support.traces import trace


def drafted(method: Method, text: list[int], *, room: int = 32, draft_row: int | None = None) -> list[int]:
    """Tokens that `method` drafts after the prompt 900, 901 and `text`."""
    draft_row = method.open(trace([0]), 1000) if draft_row is None else draft_row
    ids = np.zeros((1, 64), dtype=np.int32)
    ids[0, : 2 + len(text)] = [900, 901, *text]
    arguments = (np.array([2 + len(text)], dtype=np.int32), np.array([room], dtype=np.int32))
    return list(method.propose(np.array([draft_row]), ids, *arguments)[0])


OLD = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_paper_matches_at_least_three_tokens() -> None:
    method = HistoSpecPaper()
    method.remember("prompt", [trace(OLD)])
    assert drafted(method, [50, 3, 4, 5]) == [6, 7]
    assert drafted(method, [50, 4, 5]) == []


def test_paper_prefers_the_longest_match_up_to_seven() -> None:
    method = HistoSpecPaper()
    short = [3, 4, 5, 20, 21]
    method.remember("prompt", [trace(OLD), *[trace(short, reward=1.0)] * 5])
    assert drafted(method, [2, 3, 4, 5]) == [6, 7]
    assert drafted(method, [50, 3, 4, 5]) == [20, 21]


def test_paper_follows_rewards_at_a_fork_and_the_release_follows_counts() -> None:
    visit = [trace([1, 2, 3, 10, 11], reward=1.0), trace([1, 2, 3, 20, 21]), trace([1, 2, 3, 20, 21])]
    for method, expected in ((HistoSpecPaper(), [10, 11]), (HistoSpecReleased(), [20, 21])):
        method.remember("prompt", visit)
        assert drafted(method, [1, 2, 3]) == expected


def test_release_stops_when_the_product_of_shares_falls_below_a_tenth() -> None:
    method = HistoSpecReleased()
    # 1/4 at the first fork; the second leaves 1/8, the third 1/16
    ends = [[1, 2, 3, 10 + i // 2, 20 + i % 2, 30] for i in range(8)]
    method.remember("prompt", [trace(end) for end in ends] + [trace([*end[:5], 40 + i]) for i, end in enumerate(ends)])
    method.first_window = 16
    assert drafted(method, [1, 2, 3]) == [10, 20]
    assert method.survivals == [[0.25, 0.125]]


def test_window_sizes_follow_the_rules_of_paper_and_release() -> None:
    windows: dict[type[HistoSpec], list[int]] = {HistoSpecPaper: [2], HistoSpecReleased: [2]}
    for kind, found in windows.items():
        for accepted in (True,) * 17 + (False, False, True):
            found.append(kind().next_window(found[-1], accepted=accepted))
    assert windows[HistoSpecPaper] == [*range(2, 34, 2), 32, 32, 2, 2, 4]
    assert windows[HistoSpecReleased] == [2, 4, 8, *[16] * 15, 8, 4, 8]


def test_window_grows_only_when_the_whole_draft_was_accepted() -> None:
    method = HistoSpecPaper()
    method.remember("prompt", [trace(list(range(1, 31)))])
    draft_row = method.open(trace([0]), 1000)
    assert drafted(method, [1, 2, 3], draft_row=draft_row) == [4, 5]
    assert drafted(method, [1, 2, 3, 4, 5, 6], draft_row=draft_row) == [7, 8, 9, 10]
    assert drafted(method, [1, 2, 3, 4, 5, 6, 7, 8, 9, 50], draft_row=draft_row) == []
    assert drafted(method, [1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 13, 14, 15], draft_row=draft_row) == [16, 17]


def test_histospec_drafts_from_the_first_token_to_the_end_of_the_response() -> None:
    method = HistoSpecPaper()
    method.remember("prompt", [trace([1, 2, 3, 4], prompt=(899, 900, 901))])
    assert drafted(method, [1]) == [2, 3]
    assert drafted(method, [1, 2, 3]) == [4]
    assert drafted(method, [1, 2, 3, 4]) == []


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=12), min_size=1, max_size=4),
    st.lists(st.integers(1, 3), min_size=1, max_size=9),
)
def test_first_draft_token_is_the_majority_of_continuations_of_the_longest_match(
    responses: list[list[int]], text: list[int]
) -> None:
    method = HistoSpecReleased()
    method.remember("prompt", [trace(response) for response in responses])
    context = [900, 901, *text]
    votes: list[int] = []
    for size in range(min(7, len(context)), 2, -1):
        for response in responses:
            old = [900, 901, *response]
            votes += [old[i] for i in range(size, len(old)) if old[i - size : i] == context[-size:]]
        if votes:
            break
    found = drafted(method, text)
    most = max((votes.count(vote) for vote in votes), default=0)
    assert (votes.count(found[0]) == most) if found else most == 0


def test_ngram_continues_the_last_occurrence_of_its_tokens() -> None:
    method = Ngram(vllm_search(), max_draft_tokens=3, shortest=2, longest=4)
    assert drafted(method, [1, 2, 3, 4, 5, 6, 1, 2]) == [3, 4, 5]
    assert drafted(method, [1, 2, 3, 4, 5, 6, 1, 2], room=1) == [3]
    assert drafted(method, [1, 2, 3, 4, 5, 6]) == []


def test_product_drafts_the_prompts_last_response(tmp_path: Path) -> None:
    method = Product(tmp_path, max_draft_tokens=4)
    old = trace(list(range(1, 40)))
    method.remember("prompt", [old])
    found = decode(Replay(method, [old], batch=1, max_draft_tokens=4, max_response_tokens=64))
    assert found.tokens_per_forward > 3
    assert method.num_tokens_built == 39
    assert method.num_bytes() < 39 * 8 + 2048
    assert 0 < method.drain().num_accepted <= found.num_accepted


def test_arctic_gets_the_calls_that_vllm_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "arctic_inference" / "suffix_decoding"
    folder.mkdir(parents=True)
    for name in ("__init__.py", "suffix_decoding/__init__.py", "suffix_decoding/_C.so"):
        (tmp_path / "arctic_inference" / name).touch()
    (folder / "cache.py").write_text(FAKE, encoding="utf-8")
    for name in [name for name in sys.modules if name.startswith("arctic_inference")]:
        monkeypatch.delitem(sys.modules, name)
    module = arctic.load(tmp_path)
    assert module is not None
    method = arctic.Arctic(module, max_draft_tokens=5, depth=3, factor=2.0, min_probability=0.25)
    method.remember("prompt", [trace([7, 8])])
    draft_row = method.open(trace([0], step=1), 100)
    assert drafted(method, [1], draft_row=draft_row, room=9) == [42]
    assert drafted(method, [1, 2, 3], draft_row=draft_row, room=4) == [42]
    assert method.survivals == [[0.5]]
    method.close(draft_row)
    method.remember("prompt", [trace([1, 2, 3], step=1)])
    (cache,) = method._caches.values()
    assert cache.calls == [  # type: ignore[attr-defined]
        ("start", 0, [900, 901]),
        ("add", 0, [7, 8]),
        ("stop", 0),
        ("start", 1, [900, 901]),
        ("add", 1, [1]),
        ("speculate", 1, [900, 901, 1], 5, 2.0, 0.25),
        ("add", 1, [2, 3]),
        ("speculate", 1, [1, 2, 3], 4, 2.0, 0.25),
        ("stop", 1),
    ]
    for name in [name for name in sys.modules if name.startswith("arctic_inference")]:
        monkeypatch.delitem(sys.modules, name)


FAKE = """
class Draft:
    token_ids, probs = [42], [0.5]


class SuffixDecodingCache:
    def __init__(self, depth, requests):
        self.calls = []

    def start_request(self, draft_row, ids):
        self.calls.append(("start", draft_row, ids.tolist()))

    def stop_request(self, draft_row):
        self.calls.append(("stop", draft_row))

    def add_active_response(self, draft_row, ids):
        self.calls.append(("add", draft_row, ids.tolist()))

    def speculate(self, draft_row, context, max_spec_tokens, max_spec_factor, min_token_prob):
        self.calls.append(("speculate", draft_row, context.tolist(), max_spec_tokens, max_spec_factor, min_token_prob))
        return Draft
"""


def test_a_baseline_that_was_not_built_is_not_loaded(tmp_path: Path) -> None:
    assert arctic.load(tmp_path) is None
