import pytest
import torch

from megatron_rl.config import ParallelConfig
from megatron_rl.model.logprobs import token_scores, vocab_shard

VOCAB, PADDED, HIDDEN, ROWS = 150, 256, 32, 23


def problem(dtype=torch.float32):
    """Hidden states, output weight (padding rows would win every token), targets and score weights."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    weight[VOCAB:] *= 100
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    coefficients = torch.randn(2, ROWS, generator=generator)
    return hidden.to(dtype), weight.to(dtype), targets, coefficients


def reference(hidden, weight, targets, coefficients, temperature):
    """Scores and gradients by torch's log_softmax, in FP64."""
    hidden = hidden.double().requires_grad_()
    weight = weight.double().requires_grad_()
    logp = ((hidden @ weight[:VOCAB].T) / temperature).log_softmax(dim=1)
    logprobs, entropy = logp[torch.arange(ROWS), targets], -(logp.exp() * logp).sum(dim=1)
    (coefficients[0] * logprobs + coefficients[1] * entropy).sum().backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def scores_and_gradients(hidden, weight, targets, coefficients, temperature, chunk_tokens, shard):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    scores = token_scores(hidden, weight, targets, shard=shard, temperature=temperature, chunk_tokens=chunk_tokens)
    (coefficients[0] * scores.logprobs + coefficients[1] * scores.entropy).sum().backward()
    return scores.logprobs.detach(), scores.entropy.detach(), hidden.grad, weight.grad


WHOLE = vocab_shard(vocab_size=VOCAB, num_rows=PADDED, tensor_rank=0, group=None)


@pytest.mark.parametrize("chunk_tokens", [1, 7, ROWS, 1000])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_scores_and_gradients_equal_log_softmax(temperature, chunk_tokens):
    found = scores_and_gradients(*problem(), temperature, chunk_tokens, WHOLE)
    expected = reference(*problem(), temperature)
    for value, wanted in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(value.double(), wanted, atol=1e-6, rtol=1e-6)
    for value, wanted in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(value.double(), wanted, atol=1e-5, rtol=1e-5)


def test_logits_of_bf16_weights_are_fp32():
    hidden, weight, targets, coefficients = problem(torch.bfloat16)
    found = scores_and_gradients(hidden, weight, targets, coefficients, 1.0, 7, WHOLE)
    expected = reference(hidden, weight, targets, coefficients, 1.0)
    for value, wanted in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(value.double(), wanted, atol=1e-5, rtol=1e-6)
    for value, wanted in zip(found[2:], expected[2:], strict=True):
        assert value.dtype is torch.bfloat16
        torch.testing.assert_close(value.double(), wanted, atol=0.05, rtol=0.02)


def test_an_unused_score_has_no_gradient():
    hidden, weight, targets, _ = problem()
    leaf = hidden.clone().requires_grad_()
    token_scores(leaf, weight, targets, shard=WHOLE, temperature=1.0, chunk_tokens=5).logprobs.sum().backward()
    only = reference(hidden, weight, targets, torch.tensor([1.0, 0.0])[:, None].expand(2, ROWS), 1.0)
    torch.testing.assert_close(leaf.grad.double(), only[2], atol=1e-5, rtol=1e-5)


def test_padding_rows_get_no_gradient():
    _, _, _, grad_weight = scores_and_gradients(*problem(), 1.0, 7, WHOLE)
    assert not grad_weight[VOCAB:].any()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_an_invalid_temperature_is_refused(temperature):
    hidden, weight, targets, _ = problem()
    with pytest.raises(ValueError, match="temperature"):
        token_scores(hidden, weight, targets, shard=WHOLE, temperature=temperature, chunk_tokens=5)


def sharded_scores(position, parallel, vocab, temperature):
    from megatron.core import parallel_state

    hidden, weight, targets, coefficients = problem()
    rows = PADDED // parallel.tensor
    shard = vocab_shard(
        vocab_size=vocab,
        num_rows=rows,
        tensor_rank=position.tensor,
        group=parallel_state.get_tensor_model_parallel_group(),
    )
    mine = weight[position.tensor * rows : (position.tensor + 1) * rows]
    found = scores_and_gradients(hidden, mine, targets, coefficients, temperature, 7, shard)
    return [value.numpy() for value in found]


@pytest.mark.parametrize("tensor", [2, 4])
def test_vocabulary_shards_give_the_scores_of_the_whole_vocabulary(ranks, tensor):
    results = ranks.run(sharded_scores, VOCAB, 0.8, parallel=ParallelConfig(tensor=tensor))
    logprobs, entropy, grad_hidden, grad_weight = reference(*problem(), 0.8)
    for result in results:
        torch.testing.assert_close(torch.from_numpy(result[0]).double(), logprobs, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(torch.from_numpy(result[1]).double(), entropy, atol=1e-6, rtol=1e-6)
    summed = sum(torch.from_numpy(result[2]).double() for result in results)
    torch.testing.assert_close(summed, grad_hidden, atol=1e-5, rtol=1e-5)
    joined = torch.cat([torch.from_numpy(result[3]).double() for result in results])
    torch.testing.assert_close(joined, grad_weight, atol=1e-5, rtol=1e-5)
