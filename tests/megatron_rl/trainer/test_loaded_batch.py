"""Bytes that the samples of a step take on their rank, against the constants of the memory plan."""

import dataclasses
from collections.abc import Iterator

from megatron_rl.config import AlgorithmConfig, ParallelConfig
from megatron_rl.memory import PACKED_TOKEN_BYTES, PREPARED_TOKEN_BYTES
from tests.megatron_rl.trainer.test_trainer import batch_for

ALGORITHM = AlgorithmConfig(group_size=4, prompts_per_step=64)


def bytes_a_token(value: object, num_tokens: int) -> Iterator[int]:
    """Of every tensor in a dataclass that has an element for each of `num_tokens` tokens."""
    import torch

    if isinstance(value, torch.Tensor):
        if len(value) == num_tokens:
            yield value.element_size()
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from bytes_a_token(getattr(value, field.name), num_tokens)


def test_a_packed_response_token_has_the_counted_bytes() -> None:
    import torch

    from megatron_rl.trainer.loaded_batch import load_mini_batch

    batch = batch_for(ParallelConfig(), ALGORITHM, groups=64, max_tokens=10_000)
    (mini,) = batch.of_rank(0).mini_batches
    (micro,) = load_mini_batch(mini, lambda refs: refs, multiple_of=1, device=torch.device("cpu")).micro_batches
    rows, responses = len(micro.packed.tokens), len(micro.packed.targets)
    assert rows != responses
    a_row, a_response = (sum(bytes_a_token(micro, count)) for count in (rows, responses))
    assert a_row + a_response == PACKED_TOKEN_BYTES


def test_prepared_columns_have_at_most_the_counted_bytes() -> None:
    """Four columns of floats and one of booleans; a reference's and a critic's scores are floats, too."""
    from megatron_rl.trainer.preparation import Prepared

    columns = {field.name for field in dataclasses.fields(Prepared)}
    assert columns == {"old_logprobs", "weights", "counted", "advantages", "returns", "further"}
    assert PREPARED_TOKEN_BYTES == 4 * 4 + 1 + 2 * 4
