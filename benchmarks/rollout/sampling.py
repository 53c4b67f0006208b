"""Time from a forward's logits to tokens and log-probabilities, with the product's sampler and with vLLM's.

`python -m benchmarks.rollout.sampling --json OUT [--device cuda]`: requests with seeds at temperature 1 and
log-probabilities of each token, as in a rollout, with and without drafts. Seconds are medians, of CPU time with one
thread or of a CUDA device. On CUDA, peak bytes are those allocated beside the logits. `vllm stock` is the sampler of an
engine without speculation; without drafts it has the same task.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from benchmarks.harness.record import Row, arguments, write
from rollout.cpu import quirks
from rollout.worker.sampler import ModelRunner, TokenSampler

LOGPROBS = "processed_logprobs"
VOCABULARIES = (32_000, 151_936)
REQUESTS = {"cpu": (1, 8, 32, 64), "cuda": (1, 8, 32, 64, 256)}
LONGEST = 16
SHAPES: Mapping[str, Callable[[int], list[int]]] = {
    "none": lambda num: [0] * num,
    "one each": lambda num: [1] * num,
    "one each, one of 16": lambda num: [LONGEST] + [1] * (num - 1),
    "four each": lambda num: [4] * num,
}
"""Draft lengths as a function of the number of requests."""
MOST_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 28}
REPEATS = 7


def sampling_metadata(num_requests: int, device: str) -> SamplingMetadata:
    """Metadata of a rollout: temperature 1, one seed per request, log-probabilities of every token."""
    nothing = torch.zeros(num_requests, device=device)
    return SamplingMetadata(
        temperature=torch.ones(num_requests, device=device),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={row: torch.Generator(device).manual_seed(row) for row in range(num_requests)},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[] for _ in range(num_requests)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def draft_metadata(drafts: Sequence[Sequence[int]], device: str = "cpu") -> SpecDecodeMetadata:
    """Metadata of these drafts, as in vLLM's model runner."""
    lengths = torch.tensor([len(draft) for draft in drafts])
    ends = (lengths + 1).cumsum(0)
    is_draft = torch.ones(int(ends[-1]), dtype=torch.bool)
    is_draft[ends - 1] = False
    tokens = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32)
    return SpecDecodeMetadata(
        draft_token_ids=tokens.to(device),
        num_draft_tokens=lengths.tolist(),
        cu_num_draft_tokens=lengths.cumsum(0).int().to(device),
        cu_num_sampled_tokens=ends.int().to(device),
        target_logits_indices=is_draft.nonzero()[:, 0].int().to(device),
        bonus_logits_indices=(ends - 1).int().to(device),
        logits_indices=torch.arange(int(ends[-1]), device=device),
    )


def _measure(run: Callable[[], SamplerOutput], device: str) -> tuple[float, int]:
    """Median seconds, and peak bytes on CUDA."""
    run()
    clock, seconds = time.perf_counter if device == "cuda" else time.process_time, []
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    for _ in range(REPEATS):
        began = clock()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - began)
    return statistics.median(seconds), torch.cuda.max_memory_allocated() - before if device == "cuda" else 0


def rows_of(shape: str, num_requests: int, vocabulary: int, device: str) -> list[Row]:
    """Rows of each sampler on the same logits."""
    lengths = SHAPES[shape](num_requests)
    torch.manual_seed(0)
    drafts = draft_metadata([torch.randint(vocabulary, (length,)).tolist() for length in lengths], device)
    logits = (2 * torch.randn(num_requests + sum(lengths), vocabulary, device=device)).bfloat16()
    sampling, sampler = sampling_metadata(num_requests, device), Sampler(LOGPROBS)
    rejection = RejectionSampler(sampler)
    batch = SimpleNamespace(
        sampling_metadata=sampling, num_reqs=num_requests, num_tokens_no_spec=np.zeros(num_requests, dtype=np.int32)
    )
    ours = TokenSampler(cast(ModelRunner, SimpleNamespace(input_batch=batch, sampler=sampler, _sample=None)))
    methods: dict[str, Callable[[], SamplerOutput]] = {
        "ours": lambda: ours.sample(logits, drafts),
        "vllm": lambda: rejection(drafts, None, logits, sampling),
    }
    if not any(lengths):
        methods["vllm stock"] = lambda: sampler(logits, sampling)
    rows: list[Row] = []
    for method, run in methods.items():
        seconds, peak = _measure(run, device)
        known: Row = {"device": device, "vocabulary": vocabulary, "requests": num_requests, "drafts": shape}
        rows.append({**known, "method": method, "seconds": seconds} | ({"peak_bytes": peak} if peak else {}))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all shapes and write the record."""
    parser = arguments("Seconds from logits to tokens and log-probabilities.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(argv)
    if options.device == "cpu":  # as in an engine process
        torch.set_num_threads(1)
        current_platform.import_kernels()
        type(current_platform).register_triton_kernel_overrides()
        quirks.drafted_rows_are_sampled_at_a_random_temperature()
        quirks.padding_of_a_draft_is_accepted()
    device: str = options.device
    rows: list[Row] = []
    for vocabulary in VOCABULARIES[: 1 if options.quick else None]:
        for num_requests in REQUESTS[device][: 2 if options.quick else None]:
            for shape in SHAPES:
                if (sum(SHAPES[shape](num_requests)) + num_requests) * vocabulary > MOST_LOGITS[device]:
                    continue
                measured = rows_of(shape, num_requests, vocabulary, device)
                print(vocabulary, num_requests, shape, *(f"{row['method']} {row['seconds']:.2g} s" for row in measured))
                rows += measured
    write(options.json, rows=rows, not_measured=[] if device == "cuda" else ["any GPU"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
