"""Version spans, and columns of a group."""

import dataclasses
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.engine.engine import Engine
from rollout.engine.responses import Finished, Response, ResponseLedger, columns, sampling_params, spans
from rollout.types import (
    FinishReason,
    GroupId,
    Prompt,
    PromptGroup,
    PromptId,
    SamplingSpec,
    WeightSpan,
    WeightVersion,
)
from tests.support.scored_groups import scored_group


def per_token(stamps: list[tuple[int, int]], last: int, length: int) -> list[int]:
    """Weight version of each token, as a loop over tokens."""
    return [next((version for version, end in stamps if token < end), last) for token in range(length)]


@given(counts=st.lists(st.integers(min_value=0, max_value=20), max_size=6), rest=st.integers(min_value=0, max_value=20))
def test_spans_give_the_version_of_every_token(counts, rest):
    ends = np.cumsum(counts).tolist()
    stamps = [(WeightVersion(version), end) for version, end in enumerate(ends)]
    length = sum(counts) + rest
    found = spans(stamps, WeightVersion(len(counts)), length)
    assert [v for span in found for v in [span.weight_version] * span.num_tokens] == per_token(
        stamps, len(counts), length
    )
    assert sum(span.num_tokens for span in found) == length
    assert length == 0 or all(span.num_tokens > 0 for span in found)


def test_a_response_without_tokens_still_names_a_version():
    assert spans([], WeightVersion(4), 0) == (WeightSpan(weight_version=WeightVersion(4), num_tokens=0),)


@pytest.mark.parametrize(("configured", "sampled"), [(0.01, 0.01), (0.00999, 0.01), (0.02, 0.02)])
def test_vllm_samples_at_the_lowest_temperature_that_training_accepts_and_raises_lower_ones(configured, sampled):
    sampling = SamplingSpec(temperature=configured, max_response_tokens=4)
    assert sampling_params(sampling, 1, (), {}).temperature == sampled


def response(request_id: str) -> Response:
    return Response(group=scored_group(1).group, sample=0, queue=SimpleNamespace(request_id=request_id))


def output(num_tokens: int) -> SimpleNamespace:
    logprobs = SimpleNamespace(logprobs=[-0.5] * num_tokens, ranks=[0, -1, 1] * num_tokens)
    del logprobs.ranks[num_tokens:]
    completion = SimpleNamespace(token_ids=list(range(num_tokens)), logprobs=logprobs, finish_reason="length")
    return SimpleNamespace(outputs=[completion])


def test_a_response_that_ended_before_an_update_has_the_old_version_even_if_collected_later():
    ledger, early, late = ResponseLedger(), response("early"), response("late")
    ledger.add(early)
    ledger.add(late)
    ledger.stamp(WeightVersion(3), {"early": None, "late": 4}.get)
    ledger.stamp(WeightVersion(4), {"early": None, "late": 9}.get)
    found = ledger.finish(early, output(6), WeightVersion(5))
    assert found.weight_spans == (WeightSpan(weight_version=WeightVersion(3), num_tokens=6),)
    assert found.reason is FinishReason.LENGTH
    assert found.resampled.tolist() == [False, True, False] * 2
    found = ledger.finish(late, output(11), WeightVersion(5))
    assert [(span.weight_version, span.num_tokens) for span in found.weight_spans] == [(3, 4), (4, 5), (5, 2)]
    assert len(ledger) == 0 and ledger.num_finished == 2 and ledger.num_tokens == 17


def test_a_missing_log_probability_is_an_error():
    ledger, one = ResponseLedger(), response("a")
    broken = output(3)
    broken.outputs[0].logprobs.logprobs.pop()
    with pytest.raises(RuntimeError, match="2 log-probabilities for 3 tokens"):
        ledger.finish(one, broken, WeightVersion(0))


def test_a_non_finite_log_probability_is_refused_with_its_position_and_version():
    prompt = Prompt(
        prompt_id=PromptId("p"),
        data_source="test",
        token_ids=np.array([1, 2], dtype=np.int32),
        ground_truth="",
        extra_info_json="null",
    )
    sampling = SamplingSpec(temperature=1.0, max_response_tokens=8)
    group = PromptGroup(group_id=GroupId(7), step=0, prompt=prompt, sampling=sampling, seeds=(0, 1))
    versions = tuple(
        WeightSpan(weight_version=WeightVersion(version), num_tokens=count) for version, count in ((4, 2), (5, 3))
    )

    def of(*logprobs: float) -> Finished:
        return Finished(
            response_ids=np.arange(5, dtype=np.int32),
            rollout_logprobs=np.array(logprobs, dtype=np.float32),
            resampled=np.array([value < -1 for value in logprobs]),
            reason=FinishReason.STOP,
            weight_spans=versions,
        )

    good = of(-1, -2, 0, -3, -1)
    joined = columns(group, [good, good])
    assert joined.logprobs(1).tolist() == [-1, -2, 0, -3, -1]
    assert joined.resampled_in(1).tolist() == [False, True, False, True, False]
    for place, version in ((1, 4), (2, 5), (4, 5)):
        for value in (np.nan, -np.inf):
            logprobs = [-1.0] * 5
            logprobs[place] = value
            with pytest.raises(
                RuntimeError, match=rf"group 7: 1 of 5 .* response 1 .* token {place}, .*version {version}"
            ):
                columns(group, [good, of(*logprobs)])


def test_the_actor_has_every_method_of_the_engine_with_the_same_parameters():
    from rollout.engine.actor import EngineActor

    actor = EngineActor.__ray_metadata__.modified_class
    ours = {name: m for name, m in inspect.getmembers(Engine, inspect.isfunction) if not name.startswith("_")}
    ours["close"] = ours.pop("shutdown")
    del ours["on_response_ended"]  # a listener lives in the engine's process; from outside it is `connect_history`
    for name, method in ours.items():
        found = set(inspect.signature(getattr(actor, name)).parameters) - {"_ray_trace_ctx"}
        renamed = {"columns_so_far": "parts_so_far"}  # the tokens of a group travel in parts
        assert found == {renamed.get(parameter, parameter) for parameter in inspect.signature(method).parameters}


def test_a_finished_response_is_immutable():
    found = ResponseLedger().finish(response("a"), output(1), WeightVersion(0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.reason = FinishReason.STOP
