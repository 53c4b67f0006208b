"""Scores of groups in watched worker processes, and the start of the text actor's parts; no Ray."""

import asyncio
import logging
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from rollout.config import RewardConfig
from rollout.data.tokenizer import TokenizerSource
from rollout.failures import RewardBrokenError
from rollout.rewards.scorer import ResponseScorer
from rollout.rewards.text_actor import TextParts
from rollout.types import GroupColumns, GroupId, Prompt, PromptGroup, PromptId, SamplingSpec, ScoreStatus
from tests.support.byte_tokenizer import tokenizer_in, write_byte_tokenizer
from tests.support.deadline import DEADLINE_S

FUNCTIONS = "tests.support.reward_functions"
HARD_ANSWER = r"\boxed{\sum_{n=1}^{1000000000} \frac{1}{n^2}}"
"""Takes hours to compare with a number."""


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_byte_tokenizer(directory)
    return str(directory)


class Scorer:
    """A scorer in an event loop of its own."""

    def __init__(self, loop, scorer):
        self.loop = loop
        self.inner = scorer

    def score(self, group, columns):
        return self.loop.run(self.inner.score(group, columns))


@pytest.fixture
def scorer_of(model_directory):
    made = []
    with asyncio.Runner() as loop:

        def start(function, **config):
            scorer = ResponseScorer(tokenizer_in(model_directory), RewardConfig(function=function, **config))
            loop.run(scorer.start())
            made.append(scorer)
            return Scorer(loop, scorer)

        yield start
        for scorer in made:
            loop.run(scorer.close())


def group_of(scorer, texts):
    encoded = [np.append(ids, 256) for ids in scorer.inner._tokenizer.encode(texts, add_special_tokens=False)]
    prompt = Prompt(
        prompt_id=PromptId("set/0"),
        data_source="set",
        token_ids=np.zeros(1, dtype=np.int32),
        ground_truth="abc",
        extra_info_json='{"index": 4}',
    )
    group = PromptGroup(
        group_id=GroupId(0),
        step=0,
        prompt=prompt,
        sampling=SamplingSpec(temperature=1.0, max_response_tokens=16),
        seeds=tuple(range(len(texts))),
    )
    response_ids = np.concatenate(encoded).astype(np.int32)
    columns = GroupColumns(
        prompt_ids=prompt.token_ids,
        response_ids=response_ids,
        rollout_logprobs=np.zeros(len(response_ids), dtype=np.float32),
        resampled=np.zeros(len(response_ids), dtype=np.bool_),
        offsets=np.cumsum([0, *(len(ids) for ids in encoded)]),
    )
    return group, columns


def test_responses_are_decoded_without_special_tokens_and_scored_in_order(scorer_of):
    scorer = scorer_of(f"{FUNCTIONS}.length", num_workers=2)
    scores = scorer.score(*group_of(scorer, ["abc", "äé", "x y z"]))
    assert [score.reward for score in scores] == [3.0, 2.0, 5.0]
    assert {score.status for score in scores} == {ScoreStatus.OK}
    # `same`: the text that the function saw was the ground truth "abc", without the end token that was sampled.
    assert scores[0].details == (("same", 1.0), ("index", 4.0))


def test_a_call_that_hangs_raises_or_dies_gets_the_substitute_reward_and_other_calls_succeed(scorer_of, caplog):
    scorer = scorer_of(f"{FUNCTIONS}.moody", timeout_s=1.0, failure_score=-0.5)
    with caplog.at_level(logging.WARNING, logger="rollout.rewards.scorer"):
        scores = scorer.score(*group_of(scorer, ["fine", "hang", "raise", "die", "fine", "raise"]))
    ok, timeout, error = ScoreStatus.OK, ScoreStatus.TIMEOUT, ScoreStatus.ERROR
    assert [score.status for score in scores] == [ok, timeout, error, error, ok, error]
    assert [score.reward for score in scores] == [1.0, -0.5, -0.5, -0.5, 1.0, -0.5]
    assert scores[1].error == "over the limit of 1.0 s"
    assert scores[2].error == "KeyError: 'not\\nthere'"
    assert scores[3].error.startswith("its process died")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    assert ["response '" in line for line in lines] == [True, True, False, False]


def test_a_call_that_exits_or_interrupts_fails_alone(scorer_of):
    scorer = scorer_of(f"{FUNCTIONS}.moody")
    scores = scorer.score(*group_of(scorer, ["exit", "fine", "interrupt"]))
    assert [score.error for score in scores] == ["SystemExit: 3", "", "KeyboardInterrupt:"]
    assert [score.status for score in scores] == [ScoreStatus.ERROR, ScoreStatus.OK, ScoreStatus.ERROR]


def test_a_call_over_the_limit_of_memory_or_file_size_fails_and_the_next_one_succeeds(scorer_of, tmp_path):
    scorer = scorer_of(f"{FUNCTIONS}.moody", timeout_s=30.0, memory_bytes=2 << 30, max_file_bytes=1 << 20)
    scores = scorer.score(*group_of(scorer, ["memory", f"file {tmp_path / 'large'}", "fine"]))
    assert [score.error.partition(":")[0] for score in scores] == ["MemoryError", "OSError", ""]
    assert (tmp_path / "large").stat().st_size <= 1 << 20


@pytest.mark.parametrize("wait_s", [0.0, 1.0])
def test_an_idle_worker_that_is_killed_is_replaced(scorer_of, wait_s):
    scorer = scorer_of(f"{FUNCTIONS}.moody")
    for _ in range(2):
        (score,) = scorer.score(*group_of(scorer, ["pid"]))
        os.kill(int(score.reward), signal.SIGKILL)
        time.sleep(wait_s)
    scores = scorer.score(*group_of(scorer, ["fine", "fine"]))
    assert [score.status for score in scores] == [ScoreStatus.OK] * 2


def test_a_hung_response_delays_no_other_group(scorer_of, tmp_path):
    """The hung response of the first group ends when all other groups have their scores, however late that is."""
    scorer = scorer_of(f"{FUNCTIONS}.moody", num_workers=2, timeout_s=DEADLINE_S)
    end = tmp_path / "end"

    async def score_all():
        hung = asyncio.create_task(scorer.inner.score(*group_of(scorer, ["fine", f"until {end}"])))
        others = [scorer.inner.score(*group_of(scorer, ["fine"] * 4)) for _ in range(7)]
        before = await asyncio.gather(*others)
        is_early = not hung.done()
        end.touch()
        return before, is_early, await hung

    before, is_early, last = scorer.loop.run(score_all())
    assert is_early and [score.reward for group in (*before, last) for score in group] == [1.0] * 30


def test_without_a_substitute_a_response_whose_scoring_failed_leaves_its_group(scorer_of):
    scorer = scorer_of(f"{FUNCTIONS}.moody")
    scores = scorer.score(*group_of(scorer, ["fine", "raise"]))
    assert [(score.reward, score.is_left_out) for score in scores] == [(1.0, False), (0.0, True)]


@pytest.mark.parametrize("limits", [{"timeout_s": 2.0}, {"timeout_s": DEADLINE_S, "cpu_s": 2.0}])
def test_an_answer_that_takes_too_long_to_compare_is_wrong_and_stays_in_its_group(scorer_of, limits):
    scorer = scorer_of("rollout.rewards.math.compute_score", **limits)
    (score,) = scorer.score(*group_of(scorer, [HARD_ANSWER]))
    assert (score.status, score.reward, score.is_left_out) == (ScoreStatus.TIMEOUT, 0.0, False)


def test_a_configured_substitute_comes_before_the_score_of_late_calls(scorer_of):
    scorer = scorer_of("rollout.rewards.math.compute_score", timeout_s=2.0, failure_score=-0.5)
    (score,) = scorer.score(*group_of(scorer, [HARD_ANSWER]))
    assert (score.status, score.reward, score.is_left_out) == (ScoreStatus.TIMEOUT, -0.5, False)


def test_a_call_that_fails_in_time_has_no_score_of_late_calls(scorer_of):
    scorer = scorer_of("rollout.rewards.math.compute_score", timeout_s=DEADLINE_S)
    group, columns = group_of(scorer, [r"\boxed{3}"])
    (score,) = scorer.score(replace(group, prompt=replace(group.prompt, ground_truth="")), columns)
    assert (score.status, score.is_left_out) == (ScoreStatus.ERROR, True)


def test_a_late_call_of_a_function_without_a_score_of_late_calls_leaves_its_group(scorer_of):
    scorer = scorer_of(f"{FUNCTIONS}.moody", timeout_s=1.0)
    (score,) = scorer.score(*group_of(scorer, ["hang"]))
    assert (score.status, score.reward, score.is_left_out) == (ScoreStatus.TIMEOUT, 0.0, True)


def test_a_wrong_return_type_stops_the_run(scorer_of):
    scorer = scorer_of(f"{FUNCTIONS}.textual")
    with pytest.raises(RewardBrokenError, match=r"reward\.function: .*textual returned 'good'.*dict with `score`"):
        scorer.score(*group_of(scorer, ["a"]))


def test_a_function_that_fails_for_every_response_of_several_prompts_stops_the_run(scorer_of):
    scorer = scorer_of(f"{FUNCTIONS}.broken")
    group, columns = group_of(scorer, ["a", "b", "c", "d", "e"])
    for number in range(3):  # enough responses, too few prompts
        prompt = replace(group.prompt, prompt_id=PromptId(f"set/{number}"))
        scores = scorer.score(replace(group, prompt=prompt), columns)
        assert {score.status for score in scores} == {ScoreStatus.ERROR}
    with pytest.raises(RewardBrokenError, match=r"broken has failed for each of the first 16 responses, to 4 prompts"):
        scorer.score(replace(group, prompt=replace(group.prompt, prompt_id=PromptId("set/3"))), columns)


def test_groups_that_are_scored_side_by_side_end_with_the_same_words(scorer_of):
    scorer = scorer_of(f"{FUNCTIONS}.broken")
    group, columns = group_of(scorer, ["a", "b", "c", "d"])

    async def score_all():
        prompts = [replace(group.prompt, prompt_id=PromptId(f"set/{number}")) for number in range(8)]
        scoring = [scorer.inner.score(replace(group, prompt=prompt), columns) for prompt in prompts]
        return await asyncio.gather(*scoring, return_exceptions=True)

    ends = scorer.loop.run(score_all())
    words = {str(end) for end in ends if isinstance(end, RewardBrokenError)}
    assert sum(isinstance(end, RewardBrokenError) for end in ends) == 5
    assert len(words) == 1 and "each of the first 16 responses, to 4 prompts" in words.pop()


def test_a_function_that_succeeded_once_does_not_stop_the_run(scorer_of):
    scorer = scorer_of(f"{FUNCTIONS}.moody")
    group, columns = group_of(scorer, ["fine"] + ["raise"] * 9)
    for number in range(5):
        scorer.score(replace(group, prompt=replace(group.prompt, prompt_id=PromptId(f"set/{number}"))), columns)


def test_a_module_whose_import_fails_is_distinguished_from_a_wrong_path(scorer_of):
    with pytest.raises(RewardBrokenError, match=r"importing its module failed: KeyError: 'wrong'"):
        scorer_of("tests.support.runs.unimportable_reward.compute_score")
    with pytest.raises(ValueError, match=r"No module named 'tests.nowhere'"):
        scorer_of("tests.nowhere.compute_score")


def test_a_failing_check_of_the_settings_is_named(scorer_of):
    with pytest.raises(RewardBrokenError, match=r"check of the settings failed: .*No module named 'verifier'"):
        scorer_of("tests.support.runs.reward_without_library.compute_score")


def test_a_bad_path_is_an_error_at_start(scorer_of):
    with pytest.raises(ValueError, match=r"reward\.function.*has no 'lenght'; did you mean 'length'"):
        scorer_of(f"{FUNCTIONS}.lenght")


def test_a_tokenizer_that_does_not_fit_the_model_is_an_error_at_start(tmp_path):
    write_byte_tokenizer(tmp_path, model_vocab_size=100)
    with pytest.raises(ValueError, match="vocab_size is 100"):
        TextParts.start(TokenizerSource(directory=str(tmp_path)))


def test_the_parts_of_the_text_actor_share_a_tokenizer(model_directory, tmp_path):
    parts = TextParts.start(TokenizerSource(directory=model_directory))
    facts = parts.tokenizer
    assert (facts.vocab_size, facts.eos_token_id, facts.has_chat_template) == (260, 256, True)
    (tmp_path / "one.jsonl").write_text('{"prompt": "1 + 1", "ground_truth": "2"}\n')
    loaded = parts.prompts.load(str(tmp_path / "one.jsonl"), max_prompt_tokens=99)
    assert [prompt.prompt_id for prompt in loaded.prompts] == ["one/0"]
