"""Samples tokens with one random number per token, and accepts a draft as far as it equals the sampled tokens.

The random number is a hash of the response's seed and the token's position in its text. So a response is the same with
and without drafts, in any batch, except for the rounding of its logits. A draft token is accepted if it equals the
sampled token, which happens with the probability that the model gives it. Otherwise the sampled token has the model's
distribution over all other tokens. This is speculative sampling (Leviathan et al., arXiv:2211.17192) with drafts of
probability 1.

The emitted token at a rejected draft is marked in vLLM's column of ranks, which travels with the log-probabilities and
has no other use here (`RESAMPLED`).

vLLM's rejection sampler also runs without drafts. For log-probabilities it copies a row of logits for each request and
token of the longest draft, which takes more memory than all logits together and more time than some forwards.

Invariant: vLLM's own sampler handles every request that asks for more than temperature, top-p, top-k and the
log-probability of the emitted token.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    LogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import InputBatch

from rollout.config import GPU_LOGITS_AT_ONCE
from rollout.worker.vllm_compat import RESAMPLED

_log = logging.getLogger(__name__)

_BLOCK = 256
"""Vocabulary tokens per block: a token is searched among the sums of blocks first, then within one block."""
_AT_ONCE = {"cpu": 1 << 19, "cuda": GPU_LOGITS_AT_ONCE}
"""Logits processed at a time: what fits into a core's cache, and 128 MB on a GPU."""
_GREEDY = 1e-5
"""Lower temperatures count as 0, as in vLLM."""
_IDLE = (
    (MinPLogitsProcessor, "min_p_count"),
    (LogitBiasLogitsProcessor, "biases"),
    (MinTokensLogitsProcessor, "min_toks"),
)
"""Fields of vLLM's own logits processors that are 0 or empty while no request uses the processor."""


class ModelRunner(Protocol):
    """The attributes of vLLM's model runner (V1) that this file uses."""

    input_batch: InputBatch
    sampler: Sampler

    def _sample(self, logits: torch.Tensor, metadata: SpecDecodeMetadata | None) -> SamplerOutput: ...


class TokenSampler:
    """Replaces a runner's `_sample`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._vllm_sample = runner._sample
        self._has_warned = False

    def sample(self, logits: torch.Tensor, metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        """Emit the accepted tokens of each draft and one more token.

        Args:
            logits: [M, V]; each request has one row per draft token and one more, in the order of the batch.
            metadata: vLLM's metadata of the drafts; None if no request has a draft.

        Returns:
            Tokens and log-probabilities: on the device of the logits without drafts, else on the host.
        """
        batch = self._runner.input_batch
        sampling = batch.sampling_metadata
        if self._runner.sampler.logprobs_mode != "processed_logprobs" or not _is_plain(sampling):
            if not self._has_warned:
                _log.warning("a request needs vLLM's own sampler, which then samples all requests of its batches")
                self._has_warned = True
            return self._vllm_sample(logits, metadata)
        num_rows = batch.num_reqs
        lengths = np.ones(num_rows, dtype=np.int64)
        if metadata is not None:
            lengths += metadata.num_draft_tokens
        starts = lengths.cumsum() - lengths
        rows = np.repeat(np.arange(num_rows), lengths)
        places = batch.num_tokens_no_spec[:num_rows][rows] + np.arange(len(rows)) - starts[rows]
        uniforms = uniform_numbers(_seeds(sampling.generators, num_rows)[rows], places)
        on_device = _copied([rows, starts, uniforms.view(np.int64)], logits.device)
        tokens, logprobs = draw(logits, sampling, rows=on_device[0], uniforms=on_device[2].view(torch.float64))
        emitted = emit(tokens, logprobs, metadata, on_device[1])
        return emitted if metadata is None or logits.device.type != "cuda" else _on_host(emitted)


def _copied(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The arrays as tensors of a device, by one copy for which the host does not wait."""
    joined = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    return torch.split(joined, [len(array) for array in arrays])  # type: ignore[no-any-return, no-untyped-call]


def install(runner: ModelRunner) -> None:
    """Make a runner sample by `TokenSampler` in all later forwards."""
    runner._sample = TokenSampler(runner).sample  # type: ignore[method-assign]


def uniform_numbers(seeds: npt.NDArray[np.uint64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) with 53 bits that depend on seed and position alone; arguments and result [M].

    SplitMix64 (Steele, Lea and Flood 2014), started at a hash of the seed, so that neighbouring seeds share no stream.
    """
    bits = _mixed(_mixed(seeds) + places.astype(np.uint64) * _GOLDEN) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _seeds(generators: Mapping[int, torch.Generator], num_rows: int) -> npt.NDArray[np.uint64]:
    """Seed of each row, [R]; a request without a seed gets a random one in every forward."""
    seeds = torch.randint(2**63 - 1, (num_rows,)).numpy().astype(np.uint64)
    for row, generator in generators.items():
        seeds[row] = generator.initial_seed()
    return seeds


def _is_plain(sampling: SamplingMetadata) -> bool:
    """Whether no request needs vLLM's own sampler."""
    holder = sampling.thinking_budget_state_holder
    return (
        sampling.no_penalties
        and sampling.max_num_logprobs in (None, 0)
        and not sampling.logprob_token_ids
        and sampling.allowed_token_ids_mask is None
        and not sampling.bad_words_token_ids
        and (holder is None or not holder.has_tracked_requests())
        and all(_is_idle(processor) for processor in sampling.logitsprocs.all)
    )


def _is_idle(processor: LogitsProcessor) -> bool:
    return any(type(processor) is kind and not getattr(processor, field) for kind, field in _IDLE)


def draw(
    logits: torch.Tensor, sampling: SamplingMetadata, *, rows: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sample a token for every position, with its log-probability if a request asks for it.

    Args:
        logits: [M, V]; not modified.
        sampling: temperature, top-p and top-k of the R requests.
        rows: [M], the request of each position.
        uniforms: [M], float64 in [0, 1).

    Returns:
        Tokens, int64 [M], and log-probabilities at the temperature, after top-p and top-k, float32 [M].
    """
    num_positions, vocabulary = logits.shape
    step = max(_AT_ONCE[logits.device.type] // vocabulary, 1)
    num_blocks = -(-vocabulary // _BLOCK)
    # entries beyond the vocabulary stay 0
    weights = torch.zeros((min(step, num_positions), num_blocks, _BLOCK), dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_positions, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_positions, dtype=torch.float32, device=logits.device)
    for start in range(0, num_positions, step):
        some = slice(start, min(start + step, num_positions))
        tokens[some], of_tokens = _draw_some(
            logits[some], sampling, rows[some], uniforms[some], weights[: some.stop - some.start]
        )
        if of_tokens is not None:
            logprobs[some] = of_tokens
    return tokens, None if sampling.max_num_logprobs is None else logprobs


def _draw_some(
    logits: torch.Tensor, sampling: SamplingMetadata, rows: torch.Tensor, uniforms: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`draw` for few positions at a time; `weights` is memory for their probabilities."""
    probabilities = weights.flatten(1)[:, : logits.shape[1]]
    greedy, is_greedy = None, None
    if not sampling.all_random:
        greedy = Sampler.greedy_sample(logits.float().contiguous())
        if sampling.all_greedy and sampling.max_num_logprobs is None:
            return greedy, None
    # the logits of a large batch are hundreds of megabytes on a GPU, so they are not copied
    if sampling.temperature is None:
        scores = logits.float()
    else:
        temperatures = sampling.temperature[rows]
        if greedy is not None:
            is_greedy = temperatures < _GREEDY
            temperatures = temperatures.masked_fill(is_greedy, 1.0)
        scores = logits / temperatures.unsqueeze(1)
    if sampling.top_k is not None or sampling.top_p is not None:
        top_k, top_p = (None if x is None else x[rows] for x in (sampling.top_k, sampling.top_p))
        scores = apply_top_k_top_p(scores.clone(), top_k, top_p)
    # softmax, because on a CPU torch's exponential takes ten times as long for results near 0
    torch.softmax(scores, dim=-1, out=probabilities)
    if greedy is not None and is_greedy is None:
        tokens = greedy
    else:
        # for NaN logits the token is still in the vocabulary, and its log-probability is NaN
        tokens = _pick(weights, uniforms).clamp(max=logits.shape[1] - 1)
        if greedy is not None and is_greedy is not None:
            tokens = torch.where(is_greedy, greedy, tokens)
    # from the scores, because the probability of a very unlikely token has few bits
    chosen = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens, chosen - scores.amax(dim=-1) + probabilities.amax(dim=-1).log()


def _pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Index at which the cumulative weight reaches the share `uniforms` of the total weight.

    Running sums over blocks, and over the tokens of one block, are in float64; the sum of a block is in float32. So a
    token's chance is as exact as its weight.

    Args:
        weights: [M, B, N], float32, with at least one weight above 0 for each M.
        uniforms: [M], float64.

    Returns:
        Indices into B x N, int64 [M]; never of a weight 0, except where weights are NaN.
    """
    blocks = weights.sum(dim=-1).double()
    ends = blocks.cumsum(dim=-1)
    goal = _below(uniforms * ends[:, -1], ends[:, -1])
    block = torch.searchsorted(ends, goal, right=True).clamp(max=weights.shape[1] - 1)
    inside = blocks.gather(1, block)
    share = (goal - (ends.gather(1, block) - inside)) / inside
    chosen = weights.gather(1, block.unsqueeze(2).expand(-1, -1, weights.shape[2])).squeeze(1).double().cumsum(dim=-1)
    place = torch.searchsorted(chosen, _below(share.squeeze(1) * chosen[:, -1], chosen[:, -1]), right=True)
    return (block * weights.shape[2] + place.clamp(max=weights.shape[2] - 1)).squeeze(1)


def _below(goal: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """`goal` [M] as [M, 1], clamped to [0, end): rounding may have moved it outside."""
    return torch.minimum(goal.clamp(min=0), torch.nextafter(end, torch.zeros_like(end))).unsqueeze(1)


def emit(
    tokens: torch.Tensor, logprobs: torch.Tensor | None, metadata: SpecDecodeMetadata | None, starts: torch.Tensor
) -> SamplerOutput:
    """Emit the tokens of each request up to and including the first that differs from its draft.

    Args:
        tokens: [M], sampled at all positions.
        logprobs: [M], their log-probabilities, or None.
        metadata: vLLM's metadata of the drafts; None if there are no drafts.
        starts: [R], first position of each request.
    """
    most = 0 if metadata is None else metadata.max_spec_len
    numbers = torch.arange(most + 1, device=tokens.device)
    places = (starts.unsqueeze(1) + numbers).clamp(max=len(tokens) - 1)
    emitted = tokens[places]
    # ranks of the tokens are not computed: that takes a pass over the logits
    ranks = torch.zeros_like(emitted)
    if metadata is not None and most:
        drafts = torch.full_like(tokens, -1)  # a draft's padding is -1 too, and -1 is never sampled
        drafts[metadata.target_logits_indices.long()] = metadata.draft_token_ids.long()
        agrees = tokens == drafts
        ends = agrees[places].long().cumprod(dim=1).sum(dim=1, keepdim=True)
        ranks.masked_fill_((numbers == ends) & (drafts[places] >= 0), RESAMPLED)
        emitted = emitted.masked_fill(numbers > ends, -1)
    of_emitted = None
    if logprobs is not None:
        flat = emitted.reshape(-1, 1)
        of_emitted = LogprobsTensors(flat.int(), logprobs[places].reshape(-1, 1), ranks.reshape(-1))
    return SamplerOutput(sampled_token_ids=emitted.int(), logprobs_tensors=of_emitted)


def _on_host(output: SamplerOutput) -> SamplerOutput:
    """The output of a CUDA device in host memory, after one copy and one wait.

    With drafts vLLM schedules synchronously (an engine with a `custom_class` proposer) and reads tokens,
    log-probabilities and ranks on the host at once. From the device it would copy and wait seven times
    (`RejectionSampler.parse_output`). Nothing else reads the output of the supported models.
    """
    on_device = packed(output)
    on_host = on_device.to("cpu", non_blocking=True)  # pinned, so one copy without a buffer between
    torch.cuda.current_stream(on_device.device).synchronize()
    return unpacked(on_host, output.sampled_token_ids.shape)


def packed(output: SamplerOutput) -> torch.Tensor:
    """An output's tokens, bits of log-probabilities, and ranks: int32 [3, R x K], or [1, R x K] of tokens alone."""
    tokens, found = output.sampled_token_ids, output.logprobs_tensors
    rows = [tokens]
    if found is not None:
        rows += [found.logprobs.view(torch.int32), found.selected_token_ranks]
    joined = torch.empty((len(rows), tokens.numel()), dtype=torch.int32, device=tokens.device)
    for place, row in zip(joined.unbind(), rows, strict=True):
        place.copy_(row.flatten())
    return joined


def unpacked(joined: torch.Tensor, shape: torch.Size) -> SamplerOutput:
    """The output of which `packed` made this tensor; `shape` [R, K] is that of its tokens."""
    tokens, *others = joined.unbind()
    found = None
    if others:
        logprobs, ranks = others
        found = LogprobsTensors(tokens.unsqueeze(1), logprobs.view(torch.float32).unsqueeze(1), ranks.long())
    return SamplerOutput(sampled_token_ids=tokens.view(shape), logprobs_tensors=found)
