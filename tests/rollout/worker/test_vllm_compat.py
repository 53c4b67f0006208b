"""Tokens of a request that vLLM has not ended, read from its own lists."""

from types import SimpleNamespace

import numpy as np
import pytest

from rollout.worker.vllm_compat import RESAMPLED, emitted


def llm_with(**requests) -> SimpleNamespace:
    """What `emitted` reads of an `AsyncLLM`; of every request the token ids, log-probabilities and ranks."""
    states = {
        name: SimpleNamespace(
            detokenizer=SimpleNamespace(output_token_ids=ids),
            logprobs_processor=SimpleNamespace(logprobs=SimpleNamespace(logprobs=logprobs, ranks=ranks)),
        )
        for name, (ids, logprobs, ranks) in requests.items()
    }
    return SimpleNamespace(output_processor=SimpleNamespace(request_states=states))


@pytest.mark.parametrize(
    ("ids", "logprobs", "ranks"),
    [
        ([5, 6, 7], [-0.5, -0.25, -0.125], [0, RESAMPLED, 0]),
        ([5, 6, 7, 8], [-0.5, -0.25, -0.125], [0, RESAMPLED, 0]),
        ([5, 6, 7], [-0.5, -0.25, -0.125, -1.0], [0, RESAMPLED, 0, RESAMPLED]),
    ],
)
def test_lists_of_which_vllm_has_updated_one_more_than_another_begin_with_the_same_token(ids, logprobs, ranks):
    llm = llm_with(this=(ids, logprobs, ranks), other=([1], [-2.0], [RESAMPLED]))
    found_ids, found_logprobs, resampled = emitted(llm, "this")
    assert (found_ids.dtype, found_logprobs.dtype, resampled.dtype) == (np.int32, np.float32, np.bool_)
    assert found_ids.tolist() == [5, 6, 7]
    assert found_logprobs.tolist() == [-0.5, -0.25, -0.125]
    assert resampled.tolist() == [False, True, False]


def test_a_request_that_vllm_does_not_know_has_no_tokens():
    assert [len(part) for part in emitted(llm_with(), "this")] == [0, 0, 0]
