import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.model.packed_batch import pack_batch

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6)


def numbered(lengths):
    """Samples whose token ids are all different."""
    ids = iter(range(1, 1000))
    return [
        (np.array([next(ids) for _ in range(p)], np.int32), np.array([next(ids) for _ in range(r)], np.int32))
        for p, r in lengths
    ]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_packing_equals_a_loop_over_tokens(lengths, multiple_of):
    samples = numbered(lengths)
    tokens, positions, rows, targets, starts, response_starts = [], [], [], [], [0], [0]
    for prompt, response in samples:
        whole = [*prompt.tolist(), *response.tolist()]
        for index, token in enumerate(whole):
            if index >= len(prompt):
                rows.append(len(tokens) - 1)
                targets.append(token)
            tokens.append(token)
            positions.append(index)
        starts.append(len(tokens))
        response_starts.append(len(targets))
    batch = pack_batch(samples, multiple_of=multiple_of)
    tail = len(batch.tokens) - len(tokens)
    assert len(batch.tokens) % multiple_of == 0 and 0 <= tail < multiple_of
    assert batch.tokens.tolist() == tokens + [0] * tail
    assert batch.position_ids.tolist() == positions + list(range(tail))
    assert batch.cu_seqlens.tolist() == starts + ([len(batch.tokens)] if tail else [])
    assert batch.max_seqlen == max(np.diff(batch.cu_seqlens.numpy()))
    assert (batch.score_rows.tolist(), batch.targets.tolist()) == (rows, targets)
    assert batch.response_starts == tuple(response_starts)
    assert batch.num_sequences == len(samples)


def test_every_target_is_the_token_after_its_row():
    batch = pack_batch(numbered([(3, 4), (1, 1), (2, 7)]), multiple_of=4)
    assert batch.tokens[batch.score_rows + 1].tolist() == batch.targets.tolist()


@pytest.mark.parametrize("samples", [[], numbered([(0, 3)]), numbered([(2, 2), (3, 0)])])
def test_samples_without_prompt_or_response_are_refused(samples):
    with pytest.raises(ValueError, match="needs at least 1"):
        pack_batch(samples)
