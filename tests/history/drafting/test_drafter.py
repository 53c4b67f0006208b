"""Drafting as in an engine: replays of a text, in which a draft token is accepted iff it is the next token."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest

from history.drafting.drafter import Drafter
from history.drafting.forward_cost import ForwardCostModel
from history.drafting.observed_survival import scale_to_observed_survival
from history.drafting.state import LOST, NUM_SUMS, PREDICTED, SEEN, SURVIVED
from history.index.segment import build_segment, write_segment
from history.types import PastResponse

K = 8
PROMPT = [901, 902]
UNWRITTEN = 777
"""Stands in a text where nothing has been emitted yet: whoever drafts it has read the future."""

Text = list[int]


def publish(folder: Path, responses: Sequence[Text], *, key: int = 1, version: int = 1) -> Path:
    past = [PastResponse(token_ids=np.array(r, dtype=np.int32), step=0, sample=i) for i, r in enumerate(responses)]
    return write_segment(folder, build_segment(key, version, past))


class Engine:
    """Rows that emit given responses, all in the same forwards."""

    def __init__(self, drafter: Drafter, responses: Sequence[Text], *, keys: Sequence[int] | None = None) -> None:
        self.drafter = drafter
        self.responses = [list(response) for response in responses]
        self.texts = np.full((len(responses), len(PROMPT) + max(map(len, responses)) + K), UNWRITTEN, dtype=np.int32)
        self.texts[:, : len(PROMPT)] = PROMPT
        self.emitted = np.zeros(len(responses), dtype=np.int32)
        self.draft_rows = np.array([
            drafter.open(prompt_key=key, prompt_length=len(PROMPT), max_length=len(PROMPT) + len(response))
            for key, response in zip(keys or [1] * len(responses), responses, strict=True)
        ])  # fmt: skip
        self.forwards = 0
        self.emit([[] for _ in responses])

    def emit(self, drafts: list[Text]) -> None:
        for row, draft in enumerate(drafts):
            rest = self.responses[row][self.emitted[row] :]
            accepted = next((i for i, (a, b) in enumerate(zip(draft, rest, strict=False)) if a != b), len(draft))
            new = rest[: accepted + 1]
            start = len(PROMPT) + self.emitted[row]
            self.texts[row, start : start + len(new)] = new
            self.emitted[row] += len(new)

    def propose(self, *, room: int = K) -> list[Text]:
        rooms = np.full(len(self.draft_rows), room, dtype=np.int32)
        return self.drafter.propose(self.draft_rows, self.texts, (self.emitted + len(PROMPT)).astype(np.int32), rooms)

    def run(self, look: Callable[[list[Text]], None] = lambda drafts: None) -> float:
        """Emit everything; tokens per row and forward."""
        while (self.emitted < [len(r) for r in self.responses]).any():
            drafts = self.propose()
            look(drafts)
            self.emit(drafts)
            self.forwards += 1
        for draft_row in self.draft_rows.tolist():
            self.drafter.close(draft_row)
        return sum(map(len, self.responses)) / len(self.responses) / self.forwards


def edited(generator: np.random.Generator, text: Text, rate: float) -> Text:
    """A copy with substitutions, insertions and deletions of one to three tokens."""
    found: Text = []
    position = 0
    while position < len(text):
        if generator.random() < rate:
            kind, size = int(generator.integers(3)), int(generator.integers(1, 4))
            found += generator.integers(0, 600, size=size if kind < 2 else 0).tolist()
            position += size if kind != 1 else 0
        else:
            found.append(text[position])
            position += 1
    return found


def epochs(generator: np.random.Generator, *, length: int = 400, siblings: int = 4) -> tuple[list[Text], list[Text]]:
    old = [generator.integers(0, 600, size=length).tolist() for _ in range(siblings)]
    return old, [edited(generator, text, 0.06) for text in old]


@pytest.fixture
def drafter(tmp_path: Path) -> Drafter:
    return Drafter(max_draft_tokens=K, segments_dir=str(tmp_path))


def test_a_response_that_is_repeated_is_drafted_whole(tmp_path: Path, drafter: Drafter) -> None:
    text = list(range(100, 190))
    publish(tmp_path, [text])
    assert Engine(drafter, [text]).run() > K
    stats = drafter.drain()
    assert (stats.num_requests, stats.num_hits) == (1, 1)
    assert stats.num_drafted == stats.num_accepted == stats.accepted_by_source[0]
    assert stats.num_emitted == stats.num_rows + stats.num_accepted


def test_drafts_never_cross_the_end_of_a_response_and_come_from_the_same_prompt(
    tmp_path: Path, drafter: Drafter
) -> None:
    generator = np.random.default_rng(0)
    old, new = epochs(generator)
    publish(tmp_path, old)
    publish(tmp_path, [[850] * 50], key=2)
    known = {token for text in (*old, *new, PROMPT) for token in text}
    known_pairs = {pair for text in (*old, *new, PROMPT) for pair in pairwise(text)}

    def look(drafts: list[Text]) -> None:
        for draft in drafts:
            assert set(draft) <= known
            assert set(pairwise(draft)) <= known_pairs

    assert Engine(drafter, new).run(look) > 2


def test_one_token_responses_empty_histories_and_short_prompts_are_drafted_from(tmp_path: Path) -> None:
    publish(tmp_path, [[5], [6]], key=1)
    publish(tmp_path, [], key=2)
    drafter = Drafter(max_draft_tokens=K, segments_dir=str(tmp_path), threshold=0.0)
    texts = np.array([[5, UNWRITTEN], [9, UNWRITTEN], [UNWRITTEN, UNWRITTEN]], dtype=np.int32)
    draft_rows = np.array([drafter.open(prompt_key=key, prompt_length=0, max_length=9) for key in (1, 2, 1)])
    drafts = drafter.propose(draft_rows, texts, np.array([1, 1, 0], np.int32), np.full(3, K, np.int32))
    assert drafts[:2] == [[], []]
    assert drafts[2] in ([5], [6])


@pytest.mark.parametrize(
    ("kind", "edit"),
    [
        ("substitution", lambda text: [*text[:40], 700, *text[41:]]),
        ("insertion", lambda text: [*text[:40], 700, 701, *text[40:]]),
        ("deletion", lambda text: [*text[:40], *text[44:]]),
    ],
)
def test_the_cursor_realigns_after_edits(
    tmp_path: Path, drafter: Drafter, kind: str, edit: Callable[[Text], Text]
) -> None:
    # All contexts are repeated elsewhere with other continuations, so that matches alone cannot tell.
    generator = np.random.default_rng(3)
    text = generator.integers(0, 12, size=90).tolist()
    publish(tmp_path, [text, *(generator.integers(0, 12, size=400).tolist() for _ in range(4))])
    new = edit(text)
    engine = Engine(drafter, [new])
    while engine.emitted[0] < len(new):
        drafts = engine.propose()
        if engine.emitted[0] >= 40 + 2 + 4:
            draft_row = int(engine.draft_rows[0])
            assert drafter._state.rows[draft_row, LOST] == 0, kind
        engine.emit(drafts)
        engine.forwards += 1
    assert engine.forwards <= 30


def test_running_siblings_are_drafted_from_and_useless_other_prompts_hardly() -> None:
    text = np.random.default_rng(0).integers(0, 600, size=200).tolist()

    def forwards(keys: list[int]) -> int:
        drafter = Drafter(max_draft_tokens=K)
        ahead = Engine(drafter, [text], keys=keys[:1])
        for _ in range(100):
            ahead.emit(ahead.propose())
        behind = Engine(drafter, [text[:90]], keys=keys[1:])
        behind.run()
        return behind.forwards

    assert forwards([1, 1]) < 30
    assert forwards([1, 2]) > 80


def test_predicted_survival_is_calibrated(tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    drafter = Drafter(max_draft_tokens=K, segments_dir=str(tmp_path))
    old, new = [], []
    for key in range(24):
        before, after = epochs(generator)
        publish(tmp_path, before, key=key)
        old += before
        new += after
    keys = [key for key in range(24) for _ in range(4)]
    assert Engine(drafter, new, keys=keys).run() > 3
    stats = drafter.drain()
    assert stats.calibration_error() <= 0.025
    assert sum(stats.calibration_count) > 30_000
    assert abs(sum(stats.calibration_predicted) / sum(stats.calibration_survived) - 1) < 0.04


def test_each_proposal_is_scored_once(tmp_path: Path, drafter: Drafter) -> None:
    text = list(range(100, 160))
    publish(tmp_path, [text])
    engine = Engine(drafter, [text])
    before = drafter._state.counts[:, 1].sum()
    engine.propose()
    engine.propose()
    assert drafter._state.counts[:, 1].sum() == before
    engine.emit(engine.propose())
    engine.propose()
    once = drafter._state.counts[:, 1].sum()
    assert once - before == int(engine.emitted[0]) - 1
    engine.propose()
    assert drafter._state.counts[:, 1].sum() == once


def test_rows_may_move_and_rows_without_draft_row_or_room_get_no_draft(tmp_path: Path) -> None:
    drafter = Drafter(max_draft_tokens=K, segments_dir=str(tmp_path), threshold=0.0)
    generator = np.random.default_rng(1)
    old, _ = epochs(generator)
    publish(tmp_path, old)
    engine = Engine(drafter, old)
    num_tokens = np.full(4, len(PROMPT) + 30, dtype=np.int32)
    for row in range(4):
        engine.texts[row, len(PROMPT) : len(PROMPT) + 30] = old[row][:30]
    straight = drafter.propose(engine.draft_rows, engine.texts, num_tokens, np.full(4, K, np.int32))
    assert straight == [text[30 : 30 + K] for text in old]
    moved = [2, 0, 3, 1]
    rooms = np.array([K, 0, 3, K], dtype=np.int32)
    draft_rows = np.where(np.arange(4) == 3, -1, engine.draft_rows[moved])
    again = drafter.propose(draft_rows, engine.texts[moved], num_tokens, rooms)
    assert again == [straight[2], [], straight[3][:3], []]


def test_a_damaged_segment_is_counted_and_only_disables_its_drafts(tmp_path: Path, drafter: Drafter) -> None:
    text = np.random.default_rng(0).integers(0, 600, size=120).tolist()
    path = publish(tmp_path, [text])
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])
    engine = Engine(drafter, [text, text])
    assert drafter.drain().num_damaged == 1
    engine.propose()
    path.write_bytes(whole)
    engine.run()
    assert drafter.drain().num_hits == 0
    assert engine.forwards < 100, "the segment was not looked for again"


def test_a_late_segment_is_attached_and_a_new_version_at_the_next_visit(tmp_path: Path, drafter: Drafter) -> None:
    generator = np.random.default_rng(0)
    first, second = (generator.integers(0, 600, size=300).tolist() for _ in range(2))
    engine = Engine(drafter, [first])
    for _ in range(10):
        engine.emit(engine.propose())
    publish(tmp_path, [first])
    engine.run()
    assert engine.forwards < 100
    publish(tmp_path, [second], version=2)
    assert Engine(drafter, [second]).run() > 6
    stats = drafter.drain()
    assert (stats.num_requests, stats.num_hits) == (2, 1)


@pytest.mark.slow
def test_closing_frees_everything(tmp_path: Path, drafter: Drafter) -> None:
    publish(tmp_path, [list(range(100))], key=0)
    process = psutil.Process()
    resident = 0
    for i in range(36_000):
        if i == 6_000:
            resident = process.memory_info().rss
        drafter.close(drafter.open(prompt_key=i % 50, prompt_length=4, max_length=400))
    assert process.memory_info().rss - resident < 12 << 20
    assert len(drafter._state.rows) == len(drafter._state.groups) == 64
    assert not drafter._groups and not drafter._open_rows
    assert len(process.open_files()) < 20


def test_drafts_do_not_depend_on_the_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch in which rows share prompts, some rows have no draft row, and rows come and go."""
    monkeypatch.setattr("history.drafting.parallel.LEAST_ROWS", 4)
    generator = np.random.default_rng(3)
    old, new = epochs(generator, siblings=12)
    keys = [row % 3 for row in range(len(new))]
    for key in range(2):
        publish(tmp_path, old[key::3], key=key)
    engines = [
        Engine(Drafter(max_draft_tokens=K, segments_dir=str(tmp_path), num_threads=threads), new, keys=keys)
        for threads in (1, 2, 3)
    ]
    drafted = 0
    for forward in range(40):
        if forward == 20:
            for engine in engines:
                engine.drafter.close(int(engine.draft_rows[5]))
                engine.draft_rows[5] = -1
        one, *others = [engine.propose() for engine in engines]
        assert all(other == one for other in others)
        drafted += sum(map(len, one))
        for engine in engines:
            engine.emit(one)
    assert drafted > 100
    with pytest.raises(ValueError, match="0 threads"):
        Drafter(max_draft_tokens=K, num_threads=0)


class FlatCosts(ForwardCostModel):
    """Every token of a forward costs `cost` of a plain forward of one row."""

    def __init__(self, cost: float) -> None:
        super().__init__()
        self.cost = cost

    def seconds_by_tokens(self, num_rows: int, max_tokens: int, num_context_tokens: int = 0) -> np.ndarray:
        return 1e-4 * (1.0 + self.cost * np.arange(max_tokens - num_rows + 1))


def test_drafts_are_shorter_if_tokens_cost_more(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    old, new = epochs(generator)
    publish(tmp_path, old)
    drafted = []
    for cost in (0.001, 0.06, 0.2, 0.3):
        drafter = Drafter(max_draft_tokens=K, segments_dir=str(tmp_path), cost_model=FlatCosts(cost))
        Engine(drafter, new).run()
        stats = drafter.drain()
        drafted.append(stats.num_drafted)
        assert (stats.num_drafted > 0) == (stats.saved_s > 0)
        assert stats.num_rows >= stats.num_emitted - stats.num_accepted
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] > 1.3 * drafted[1] > 1.3 * drafted[2]
    assert drafted[-1] == 0


def test_the_drafter_searches_less_often_if_nothing_can_be_drafted(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    old = [generator.integers(0, 300, size=500).tolist() for _ in range(4)]
    new = [generator.integers(300, 600, size=500).tolist() for _ in range(4)]
    publish(tmp_path, old)
    drafter = Drafter(max_draft_tokens=K, segments_dir=str(tmp_path), cost_model=FlatCosts(0.1))
    num_seen = []
    engine = Engine(drafter, new)
    engine.run(lambda drafts: num_seen.append(int(drafter._state.rows[int(engine.draft_rows[0]), SEEN])))
    assert len(set(num_seen)) < 0.25 * len(num_seen)
    stats = drafter.drain()
    assert stats.num_rows == stats.num_emitted > 0, "counted while it rests as well"


def test_a_response_longer_than_announced_is_drafted_from_history_only(tmp_path: Path) -> None:
    drafter = Drafter(max_draft_tokens=K, segments_dir=str(tmp_path), threshold=0.0)
    text = np.random.default_rng(0).integers(0, 600, size=200).tolist()
    publish(tmp_path, [text])
    draft_row = drafter.open(prompt_key=1, prompt_length=2, max_length=10)
    texts = np.array([PROMPT + text], dtype=np.int32)
    drafts = drafter.propose(np.array([draft_row]), texts, np.array([102], np.int32), np.array([K], np.int32))
    assert drafts == [text[100 : 100 + K]]


def test_a_resumed_request_with_a_longer_prompt_stays_within_its_region(tmp_path: Path) -> None:
    text = np.random.default_rng(0).integers(0, 600, size=200).tolist()
    publish(tmp_path, [text])
    drafter = Drafter(max_draft_tokens=K, segments_dir=str(tmp_path), threshold=0.0)
    short = drafter.open(prompt_key=1, prompt_length=2, max_length=8)
    resumed = drafter.open(prompt_key=1, prompt_length=102, max_length=8)
    texts = np.full((2, 210), UNWRITTEN, dtype=np.int32)
    texts[0, :4] = PROMPT + text[:2]
    texts[1, :112] = PROMPT + text[:110]
    draft_rows, known = np.array([resumed, short]), np.array([112, 4], np.int32)
    drafts = drafter.propose(draft_rows, texts[[1, 0]], known, np.full(2, K, np.int32))
    assert drafts == [text[110 : 110 + K], text[2 : 2 + K]]
    assert drafter._groups[1][1]._text.tolist()[:4] == [-1, *PROMPT, -1]


def sums_of(expected: float, survived: float) -> np.ndarray:
    sums = np.zeros(NUM_SUMS)
    sums[PREDICTED + 3], sums[SURVIVED + 3] = expected, survived
    return sums


def trusted(recent: np.ndarray, sums: np.ndarray) -> float:
    """Corrected value of a predicted survival of one half."""
    survivals = np.full((2, K), 0.5, dtype=np.float32)
    scale_to_observed_survival(recent, sums, survivals, np.array([3, 0], dtype=np.int32))
    assert (survivals[0, 3:] == 0.5).all() and (survivals[1] == 0.5).all()
    (found,) = set(survivals[0, :3].tolist())
    return found


def test_trust_falls_if_far_fewer_drafts_survive_than_predicted_and_recovers() -> None:
    recent, expected, survived = np.zeros(4), 0.0, 0.0
    for of_them, least, most in ((1.0, 0.5, 0.5), (0.7, 0.5, 0.5), (0.0, 0.0, 0.1), (1.0, 0.5, 0.5)):
        found = 0.0
        for _ in range(60):
            expected, survived = expected + 5, survived + 5 * of_them
            found = trusted(recent, sums_of(expected, survived))
        assert least <= found <= most


def test_a_single_forward_does_not_end_the_trust_in_a_large_batch() -> None:
    recent = np.zeros(4)
    for forward in range(1, 5):
        assert trusted(recent, sums_of(500.0 * forward, 500.0 * forward)) == 0.5
    assert trusted(recent, sums_of(2500.0, 2000.0)) == 0.5


def test_draining_statistics_restarts_the_count_for_trust(tmp_path: Path) -> None:
    text = list(range(1, 200))
    publish(tmp_path, [text])
    drafter = Drafter(max_draft_tokens=K, segments_dir=str(tmp_path))
    engine = Engine(drafter, [text])
    for _ in range(4):
        engine.emit(engine.propose())
    before = drafter._state.recent_survival.copy()
    assert before[0] > 0
    drafter.drain()
    assert (drafter._state.recent_survival[:2] == 0).all() and (drafter._state.recent_survival[2:] == before[2:]).all()


def test_requests_that_do_not_count_draft_and_counted_ones_can_be_kept_for_the_next_report(tmp_path: Path) -> None:
    """An evaluation's drafts are discarded while training requests of the next step have begun."""
    text = list(range(100, 190))
    publish(tmp_path, [text])
    drafter = Drafter(max_draft_tokens=K, segments_dir=str(tmp_path), threshold=0.0)
    engine = Engine(drafter, [text])
    drafter.open(prompt_key=1, prompt_length=len(PROMPT), max_length=400, is_counted=False)
    engine.run()
    first = drafter.drain(keeps_requests=True)
    assert (first.num_requests, first.num_hits) == (1, 1) and first.num_accepted > 0
    again = drafter.drain()
    assert (again.num_requests, again.num_hits, again.num_rows, again.num_accepted) == (1, 1, 0, 0)
    assert drafter.drain().num_requests == 0
