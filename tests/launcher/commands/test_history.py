"""Drafting engines of a run, and its initial history."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from history.store.prompt_store import RESPONSE_BYTES
from history.store.snapshot import OtherTokenizerError, SnapshotError
from history.store.traces import Trace, write_traces
from history.types import prompt_key
from launcher.commands.history import data_epochs, draft_spec, fill_history, small_budget, start_history
from launcher.commands.prompts import TrainingPrompts, training_order
from launcher.config.schema import RunConfig
from rollout.data.prompts import LoadedPrompts
from rollout.data.tokenizer import TokenizerFacts
from rollout.types import Prompt, PromptId

FACTS = TokenizerFacts(fingerprint="abc", vocab_size=50, eos_token_id=2, has_chat_template=True)
PROMPT = Prompt(
    prompt_id=PromptId("math/0"),
    data_source="math",
    token_ids=np.array([4, 5], dtype=np.int32),
    ground_truth="",
    extra_info_json="null",
)


class StandIn:
    """StandIn-in for `Processes` and for the service that it starts."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[tuple[str, object]] = []

    def start_history(self, config, *, directory, fingerprint, say):
        self.calls.append(("start", fingerprint))
        return self

    def restore(self, folder):
        self._call("restore", folder)

    def warm_start(self, folder, only):
        self._call("warm_start", folder)

    def append_all(self, batches):
        for batch in batches:
            self._call("append", len(batch))

    def _call(self, what, value):
        self.calls.append((what, value))
        if self.error is not None:
            raise self.error


def run_config(**parts: object) -> RunConfig:
    return RunConfig.model_validate(
        {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"train": [{"path": "x.jsonl"}]}, **parts}
    )


def start(stand: StandIn, config: RunConfig, *, snapshot: str = "") -> tuple[object, list[str]]:
    said: list[str] = []
    prompts = {PROMPT.prompt_id: PROMPT}
    service = start_history(config, stand, FACTS, run_id="x", say=said.append)  # type: ignore[arg-type]
    if service is not None:
        fill_history(service, config.history, prompts, snapshot=snapshot, say=said.append)
    return service, said


def test_engines_draft_by_default_from_one_folder_and_baseline_engines_do_not():
    config = run_config(engine={"num_engines": 3}, history={"baseline_engines": [1], "max_draft_tokens": 8})
    first, stock, last = (draft_spec(config, number, "run") for number in range(3))
    assert stock is None
    assert first == last
    assert first is not None
    assert first.max_draft_tokens == 8
    assert "run" in first.segments_dir


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"deterministic": True}, "engines do not draft: "),
        ({"history": {"drafts": False}}, ""),
        ({"history": {"baseline_engines": [0]}}, ""),
    ],
)
def test_without_drafts_no_history_is_started_and_a_deterministic_run_tells_why(parts, line):
    config, stand = run_config(**parts), StandIn()
    service, said = start(stand, config)
    assert service is None
    assert stand.calls == []
    assert draft_spec(config, 0, "run") is None
    assert [one.startswith(line) for one in said] == ([True] if line else [])


def test_a_resumed_run_loads_its_own_snapshot_and_not_the_warm_start():
    stand = StandIn()
    start(stand, run_config(history={"warm_start": "elsewhere"}), snapshot="checkpoints/3/history")
    assert stand.calls == [("start", "abc-50"), ("restore", Path("checkpoints/3/history"))]


def test_a_damaged_snapshot_is_named_and_the_run_continues():
    _, said = start(StandIn(SnapshotError("checkpoints/3/history/shard-0: is damaged")), run_config(), snapshot="c")
    assert said == ["the run continues without its history: checkpoints/3/history/shard-0: is damaged"]


def test_a_warm_start_with_another_tokenizer_is_refused_and_a_damaged_one_is_reported(tmp_path):
    (tmp_path / "manifest.json").touch()
    config = run_config(history={"warm_start": str(tmp_path)})
    with pytest.raises(ValueError, match=r"history\.warm_start.*other words; leave it out"):
        start(StandIn(OtherTokenizerError("other words")), config)
    _, said = start(StandIn(SnapshotError("torn")), config)
    assert said == ["the run starts without the history of `history.warm_start`: torn"]


def test_traces_are_accepted_as_warm_start(tmp_path):
    ids = np.array([7, 8, 9], dtype=np.int32)
    trace = Trace(step=3, prompt_id="math/0", sample=0, prompt_ids=PROMPT.token_ids, response_ids=ids, reward=1.0)
    write_traces(tmp_path / "step-3.jsonl", [trace])
    stand = StandIn()
    start(stand, run_config(history={"warm_start": str(tmp_path)}))
    assert stand.calls == [("start", "abc-50"), ("append", 1)]


def test_traces_beyond_the_budget_are_left_out_and_that_is_said(tmp_path):
    ids = np.arange(100, dtype=np.int32)
    trace = Trace(step=3, prompt_id="math/0", sample=0, prompt_ids=PROMPT.token_ids, response_ids=ids, reward=1.0)
    write_traces(tmp_path / "step-3.jsonl", [trace])
    stand = StandIn()
    _, said = start(stand, run_config(history={"warm_start": str(tmp_path), "budget_bytes": 400 + RESPONSE_BYTES - 1}))
    assert stand.calls == [("start", "abc-50")]
    assert "holds the newest 0 prompts" in said[0]


def test_the_epoch_of_each_data_set_is_the_time_in_which_the_order_repeats_it() -> None:
    """Against the order itself: two sets of different size, the larger one drawn three times as often."""
    sizes, weights, per_step = {"few": 40, "many": 900}, [1.0, 3.0], 8
    files = tuple(
        LoadedPrompts(
            name=name,
            prompts=tuple(replace(PROMPT, prompt_id=PromptId(f"{name}/{row}")) for row in range(size)),
            num_dropped=0,
            num_truncated=0,
        )
        for name, size in sizes.items()
    )
    sets = [{"path": f"{name}.jsonl", "weight": weight} for name, weight in zip(sizes, weights, strict=True)]
    config = run_config(data={"train": sets}, algorithm={"prompts_per_step": per_step})
    training = TrainingPrompts(files=files)
    few, many = data_epochs(config, training)
    assert (few.num_steps, many.num_steps) == (20, 150)
    assert few.prompt_keys.tolist() == [prompt_key(f"few/{row}") for row in range(40)]
    visits: defaultdict[str, list[int]] = defaultdict(list)
    for place, draw in enumerate(training_order(training, config.data, seed=1, state=None).take(8 * 150 * per_step)):
        visits[draw.prompt_id].append(place // per_step)
    for epoch, name in ((few, "few"), (many, "many")):
        own = [steps for prompt_id, steps in visits.items() if prompt_id.startswith(name)]
        waits = [after - before for steps in own for before, after in pairwise(steps)]
        assert max(waits) <= 2 * epoch.num_steps
        assert np.mean(waits) == pytest.approx(epoch.num_steps, rel=0.1)


def test_a_budget_that_cannot_hold_an_epoch_is_named_with_the_one_that_can() -> None:
    """100 prompts, 8 responses of 1,000 tokens: a quarter of the longest."""
    needed = 100 * 8 * (4 * 1000 + RESPONSE_BYTES)
    shape = {"num_steps": 30, "algorithm": {"prompts_per_step": 4, "group_size": 8}}
    longest = {"max_response_tokens": 4000}

    def line(**parts: object) -> str:
        return small_budget(run_config(**(shape | {"sampling": longest} | parts)), 100)

    half = {"budget_bytes": needed // 2}
    assert "holds about 50% of the responses of an epoch (100 prompts" in line(history=half)
    assert f"About {needed} bytes hold all" in line(history=half)
    assert line(history={"budget_bytes": needed}) == ""
    assert line(history=half, num_steps=25) == "", "no prompt comes again"
    refill = {"algorithm": shape["algorithm"] | {"max_refill": 0.25}}
    assert line(history=half, num_steps=25, **refill) != "", "25 steps may draw 125 groups"
    assert line(history=half, num_steps=20, **refill) == ""
    assert line(history=half | {"drafts": False}) == ""
