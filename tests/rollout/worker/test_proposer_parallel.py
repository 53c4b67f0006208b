"""An engine of two ranks drafts like one of one rank: one rank drafts, the other only verifies."""

import numpy as np
import pytest

from tests.rollout.conftest import endless
from tests.support.engines.drafting import LENGTH, PROMPT, Reference, drafting_engine, greedy, remember

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def segments(tmp_path_factory):
    return tmp_path_factory.mktemp("segments")


@pytest.fixture(scope="module")
def drafting(checkpoints, loop, tmp_path_factory, segments):
    directory = endless(checkpoints, tmp_path_factory.mktemp("endless"))
    with drafting_engine(checkpoints, loop, directory, segments, tensor_parallel=2) as started:
        yield started


@pytest.mark.parametrize("weights", ["A", "B"])
def test_two_ranks_emit_the_models_tokens_in_fewer_forwards(drafting, segments, loop, checkpoints, weights):
    tokens, logprobs = Reference(checkpoints.path("qwen3", weights, "bf16")).greedy(PROMPT, LENGTH)
    loop.run(drafting.push(weights))
    remember(segments, drafting.engine.state().weight_version, tokens)
    loop.run(drafting.engine.draft_stats())
    _, columns = loop.run(greedy(drafting))
    assert columns.response_ids.tolist() == tokens
    assert np.abs(columns.rollout_logprobs - logprobs).max() < 1e-3
    stats = loop.run(drafting.engine.draft_stats())
    assert stats.num_rows < LENGTH / 2 and stats.num_emitted == LENGTH - 1
    assert 0 < stats.num_accepted < stats.num_drafted
