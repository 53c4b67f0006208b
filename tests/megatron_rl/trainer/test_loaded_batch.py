"""Bytes that the samples of a step take on their rank, against the constants of the memory plan."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megatron_rl.config import AlgorithmConfig, ParallelConfig
from megatron_rl.memory import PACKED_TOKEN_BYTES, PREPARED_TOKEN_BYTES
from tests.megatron_rl.trainer.test_trainer import batch_for

if TYPE_CHECKING:
    import torch

ALGORITHM = AlgorithmConfig(group_size=4, prompts_per_step=64)


def bytes_a_token(value: object, num_tokens: int) -> Iterator[int]:
    """Of every tensor in a dataclass that has an element for each of `num_tokens` tokens."""
    for tensor in tensors_of(value):
        if len(tensor) == num_tokens:
            yield tensor.element_size()


def tensors_of(value: object) -> "Iterator[torch.Tensor]":
    """Every tensor in a dataclass, in those inside it, and in their mappings."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


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
    """A critic and a reference add the most: the advantages and the returns are then columns of their own."""
    import torch

    from megatron_rl.algorithm.columns import Columns
    from megatron_rl.trainer.loaded_batch import load_mini_batch
    from megatron_rl.trainer.preparation import prepare, token_advantage, with_token_advantages

    algorithm = AlgorithmConfig(
        group_size=4,
        prompts_per_step=64,
        advantage={"name": "gae", "whiten": False},
        kl={"place": "reward"},
    )
    batch = batch_for(ParallelConfig(), algorithm, groups=64, max_tokens=10_000)
    (mini,) = batch.of_rank(0).mini_batches
    (micro,) = load_mini_batch(mini, lambda refs: refs, multiple_of=1, device=torch.device("cpu")).micro_batches
    num_tokens = len(micro.packed.targets)
    scores = Columns(tensors={"ref": torch.randn(num_tokens), "values": torch.randn(num_tokens)})
    before = prepare(micro, torch.randn(num_tokens), scores, algorithm=algorithm)
    of_tokens = token_advantage(algorithm)
    assert of_tokens is not None
    (prepared,), _ = with_token_advantages([micro], [before], of_tokens, algorithm=algorithm, kl_coefficient=0.1)
    held = {tensor.data_ptr(): tensor for tensor in tensors_of(prepared)}
    assert all(len(tensor) == num_tokens for tensor in held.values())
    assert sum(tensor.nbytes for tensor in held.values()) == PREPARED_TOKEN_BYTES * num_tokens


def test_a_token_that_the_policy_all_but_excludes_turns_no_advantage_of_another_response() -> None:
    """Beside k3 of 4.8e8 in one reward, a right response would look worse than wrong ones after the whitening."""
    import torch

    from megatron_rl.algorithm.columns import Columns
    from megatron_rl.algorithm.token_advantages import whitened, whitening_sums
    from megatron_rl.trainer.loaded_batch import load_mini_batch
    from megatron_rl.trainer.preparation import prepare, token_advantage, with_token_advantages

    algorithm = AlgorithmConfig(
        group_size=4,
        prompts_per_step=64,
        advantage={"name": "discounted_returns", "whiten": False},
        kl={"place": "reward"},
    )
    batch = batch_for(ParallelConfig(), algorithm, groups=64, max_tokens=10_000)
    (mini,) = batch.of_rank(0).mini_batches
    (micro,) = load_mini_batch(mini, lambda refs: refs, multiple_of=1, device=torch.device("cpu")).micro_batches
    old = torch.full((len(micro.packed.targets),), -0.5)
    reference = old.clone()
    old[0], reference[0] = -25.0, -1.0
    before = prepare(micro, old, Columns(tensors={"ref": reference}), algorithm=algorithm)
    of_tokens = token_advantage(algorithm)
    assert of_tokens is not None
    (after,), sums = with_token_advantages([micro], [before], of_tokens, algorithm=algorithm, kl_coefficient=1e-3)
    assert {name: float(value) for name, value in sums.items()} == {
        "kl": 10.0,
        "tokens": len(old),
        "actor/reward_kl_bounded": 1.0,
    }
    advantages = whitened(after.advantages, whitening_sums(after.advantages, micro.loss_mask))
    rewards = micro.rewards.repeat_interleave(micro.lengths)
    expected = whitened(rewards, whitening_sums(rewards, micro.loss_mask))
    torch.testing.assert_close(advantages, expected, rtol=0.0, atol=0.05)
