"""Log-probabilities and entropies of tokens, without holding logits of the whole batch.

The output layer's weight is sharded by vocabulary rows over tensor-parallel ranks. `token_scores` processes the scored
rows in chunks: only [chunk, V / tp] FP32 logits exist at one time. A chunk needs two small all-reduces: the maximum,
then three sums. The backward pass recomputes logits instead of keeping them. Padding rows of the vocabulary are
removed before the product, so their probability and gradient are exactly 0.

Logits are always FP32 (the product accumulates and returns FP32) and are divided by the sampling temperature. Results
are comparable to the sampler's processed log-probabilities.

    log p(y)      = z_y - m - log S,     S = sum_j exp(z_j - m),    z = logits / temperature
    entropy       = log S - U / S,       U = sum_j exp(z_j - m) (z_j - m)
    d log p / d z = [j = y] - p_j,       d entropy / d z = -p_j (log p_j + entropy)

Shape legend: R scored rows, C rows of one chunk, V vocabulary rows of this rank, H hidden size.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

_AT_ONCE = 1 << 22
"""Elements of a BF16 weight that are converted to FP32 at a time (CPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Scores of response tokens; equal on all tensor-parallel ranks."""

    logprobs: torch.Tensor
    """[R] FP32, at the sampling temperature; carries gradients."""
    entropy: torch.Tensor
    """[R] FP32, nats, of the same distribution; carries gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """This rank's rows of the output layer."""

    start: int
    """Vocabulary id of its first row."""
    num_valid: int
    """Rows that are vocabulary ids; the rows after them are padding."""
    group: dist.ProcessGroup | None
    """Tensor-parallel group; None when the rank holds the whole vocabulary."""


def vocab_shard(*, vocab_size: int, num_rows: int, tensor_rank: int, group: dist.ProcessGroup | None) -> VocabShard:
    """Shard of rank `tensor_rank` when every rank holds `num_rows` rows, padding included."""
    start = tensor_rank * num_rows
    return VocabShard(start=start, num_valid=min(max(vocab_size - start, 0), num_rows), group=group)


def token_scores(
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_R: torch.Tensor,
    *,
    shard: VocabShard,
    temperature: float,
    chunk_tokens: int,
) -> TokenScores:
    """Log-probabilities of `targets_R` and entropies of the distributions they were drawn from.

    `hidden_RH` is complete on every tensor-parallel rank. Its gradient is *partial*: the contribution of this rank's
    vocabulary rows. Sum it over the ranks (`copy_to_tensor_model_parallel_region`, or the reduce-scatter of
    `gather_from_sequence_parallel_region`, before the call).
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} of token_scores; needs a value above 0")
    logprobs_R, entropy_R = _TokenScores.apply(  # type: ignore[no-untyped-call]
        hidden_RH, weight_VH, targets_R, _Settings(shard=shard, temperature=temperature, chunk_tokens=chunk_tokens)
    )
    return TokenScores(logprobs=logprobs_R, entropy=entropy_R)


def _logits(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, temperature: float) -> torch.Tensor:
    """Float32 [C, V]. CUDA multiplies BF16 and returns FP32; CPU kernels need FP32 inputs."""
    if weight_VH.is_cuda and weight_VH.dtype is not torch.float32:
        return torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32).div_(temperature)
    hidden_CH = hidden_CH.float()
    if weight_VH.dtype is torch.float32:
        return (hidden_CH @ weight_VH.t()).div_(temperature)
    parts = torch.split(weight_VH, max(_AT_ONCE // weight_VH.shape[1], 1))
    return torch.cat([hidden_CH @ part.float().t() for part in parts], dim=1).div_(temperature)


def _reduce(values: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType) -> None:
    if group is not None:
        dist.all_reduce(values, op=op, group=group)


def _chunk_scores(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, targets_C: torch.Tensor, shard: VocabShard, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability, entropy and log of the partition sum of each row, [C] each."""
    sums_3C = hidden_CH.new_zeros(3, len(targets_C), dtype=torch.float32)
    max_C = hidden_CH.new_full((len(targets_C),), -torch.inf, dtype=torch.float32)
    logits_CV = _logits(hidden_CH, weight_VH, temperature)
    if shard.num_valid:
        max_C = logits_CV.amax(dim=1)
    _reduce(max_C, shard.group, dist.ReduceOp.MAX)
    if shard.num_valid:
        logits_CV -= max_C[:, None]
        local_C, is_local_C = _local_targets(targets_C, shard)
        sums_3C[2] = logits_CV.gather(1, local_C[:, None])[:, 0] * is_local_C
        exp_CV = logits_CV.exp()
        sums_3C[0] = exp_CV.sum(dim=1)
        sums_3C[1] = exp_CV.mul_(logits_CV).sum(dim=1)
    _reduce(sums_3C, shard.group, dist.ReduceOp.SUM)
    log_sum_C = sums_3C[0].log()
    return sums_3C[2] - log_sum_C, log_sum_C - sums_3C[1] / sums_3C[0], max_C + log_sum_C


def _local_targets(targets_C: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each target on this rank (0 if another rank holds it) and whether this rank holds it."""
    local_C = targets_C - shard.start
    is_local_C = (local_C >= 0) & (local_C < shard.num_valid)
    return local_C.where(is_local_C, 0), is_local_C


def _grad_logits(
    logp_CV: torch.Tensor,
    targets_C: torch.Tensor,
    entropy_C: torch.Tensor,
    grad_logprobs_C: torch.Tensor | None,
    grad_entropy_C: torch.Tensor | None,
    shard: VocabShard,
) -> torch.Tensor:
    """Gradient of the scores' weighted sum with respect to logits / temperature, [C, V]; changes `logp_CV`."""
    p_CV = logp_CV.exp()
    grad_CV = torch.zeros_like(p_CV)
    if grad_logprobs_C is not None:
        local_C, is_local_C = _local_targets(targets_C, shard)
        grad_CV.addcmul_(p_CV, grad_logprobs_C[:, None], value=-1)
        grad_CV.scatter_add_(1, local_C[:, None], (grad_logprobs_C * is_local_C)[:, None])
    if grad_entropy_C is not None:
        grad_CV.addcmul_(p_CV, logp_CV.add_(entropy_C[:, None]).mul_(grad_entropy_C[:, None]), value=-1)
    return grad_CV


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """Arguments of `token_scores` that are no tensors."""

    shard: VocabShard
    temperature: float
    chunk_tokens: int


class _Context(Protocol):
    """State that forward keeps for backward."""

    saved_tensors: tuple[torch.Tensor, ...]
    settings: _Settings

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden_RH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_R: torch.Tensor,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        valid_VH = weight_VH[: settings.shard.num_valid]
        chunks = [
            _chunk_scores(hidden_RH[rows], valid_VH, targets_R[rows], settings.shard, settings.temperature)
            for rows in _chunks(len(targets_R), settings.chunk_tokens)
        ]
        logprobs_R, entropy_R, log_z_R = (torch.cat(column) for column in zip(*chunks, strict=True))
        ctx.save_for_backward(hidden_RH, weight_VH, targets_R, entropy_R, log_z_R)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return logprobs_R, entropy_R

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: _Context, grad_logprobs_R: torch.Tensor | None, grad_entropy_R: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        shard, temperature = ctx.settings.shard, ctx.settings.temperature
        hidden_RH, weight_VH, targets_R, entropy_R, log_z_R = ctx.saved_tensors
        grad_hidden_RH = torch.zeros_like(hidden_RH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        valid = slice(0, shard.num_valid)
        # a rank with padding rows only has nothing to add, and backward has no collective
        for rows in _chunks(len(targets_R) if shard.num_valid else 0, ctx.settings.chunk_tokens):
            grad_CV = _grad_logits(
                _logits(hidden_RH[rows], weight_VH[valid], temperature) - log_z_R[rows, None],
                targets_R[rows],
                entropy_R[rows],
                None if grad_logprobs_R is None else grad_logprobs_R[rows],
                None if grad_entropy_R is None else grad_entropy_R[rows],
                shard,
            )
            grad_CV = grad_CV.div_(temperature).to(weight_VH.dtype)
            grad_hidden_RH[rows] = grad_CV @ weight_VH[valid]
            grad_weight_VH[valid] += grad_CV.t() @ hidden_RH[rows]
        return grad_hidden_RH, grad_weight_VH.to(weight_VH.dtype), None, None


def _chunks(num_rows: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_rows, chunk_tokens)]
