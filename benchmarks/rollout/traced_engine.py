"""One vLLM engine in this process that decodes recorded responses, with the worker and arguments of the product.

Responses are sampled as in a rollout: at temperature 1, with seeds and log-probabilities. Only an engine with the
product's drafter uses the product's sampler; all others use vLLM's. Time is the CPU time of the whole process while it
decodes; prompts are computed before the clock starts.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from benchmarks.rollout.forced_sampler import RESPONSE, ForcedSampler
from history.store.traces import Trace
from history.types import prompt_key
from rollout.engine.responses import draft_args, sampling_params
from rollout.engine.spec import EngineSpec
from rollout.engine.vllm_args import engine_arguments
from rollout.stop_ids import end_of_sequence_ids
from rollout.types import PromptId, SamplingSpec
from rollout.worker.proposer import PROMPT_KEY
from rollout.worker.worker import Worker

SLICE = 8
"""Tokens of a slice with one request; with n requests, SLICE times the square root of n. A slice takes a fraction of a
second, less than most disturbances of a machine."""

Speculation = Mapping[str, object]
"""vLLM's `speculative_config`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Counts and time of decoding some responses."""

    num_tokens: int
    num_forwards: int
    num_row_forwards: int
    """Sum of the rows of all forwards; without drafts, the number of tokens."""
    num_drafted: int
    """Number of verified draft tokens."""
    cpu_s: float


def write_model(directory: Path, *, vocabulary: int, hidden: int, layers: int, intermediate: int, heads: int) -> None:
    """Write the `config.json` of a Qwen3 model that is loaded with random weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": hidden // heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32_768,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def start_engine(spec: EngineSpec, speculation: Speculation | None = None) -> tuple[LLMEngine, Worker]:
    """A running engine and its worker; `VLLM_ENABLE_V1_MULTIPROCESSING` must be 0.

    Args:
        spec: the specification as in the product.
        speculation: replaces the product's speculation.
    """
    arguments = engine_arguments(spec)
    if speculation is not None:
        arguments.speculative_config = dict(speculation)
    engine = LLMEngine.from_engine_args(arguments)
    return engine, cast(Worker, engine.engine_core.engine_core.model_executor.driver_worker.worker)


class TracedEngine:
    """An engine that emits recorded responses, or samples its own."""

    def __init__(self, spec: EngineSpec, speculation: Speculation | None = None, *, own_sampler: bool = True) -> None:
        """`speculation` replaces the product's; `own_sampler`: the product's sampler, not vLLM's."""
        self.engine, self.worker = start_engine(spec, speculation)
        if not own_sampler:
            del self.worker.model_runner._sample  # removes the product's sampler, so that vLLM's is used
        self._sampler = ForcedSampler(self.worker.model_runner)
        self._directory = spec.directory
        self._num_requests = 0

    def decode(self, traces: Sequence[Trace], pause: Callable[[], None] | None = None) -> Decoding:
        """Decode these responses in one batch, each up to its last token.

        Args:
            traces: prompts and responses.
            pause: waits for this engine's turn; called before the clock starts and after every slice.

        Raises:
            RuntimeError: the engine emitted other tokens.
        """
        self._sampler.responses = [trace.response_ids for trace in traces]
        names = [self._add(number, trace) for number, trace in enumerate(traces)]
        while self._waits_for_prompts(len(traces)):
            self.engine.step()
        if pause is not None:
            pause()
        figures, emitted = self._finish(pause, every=round(SLICE * len(traces) ** 0.5))
        if emitted != {name: trace.response_ids.tolist() for name, trace in zip(names, traces, strict=True)}:
            raise RuntimeError("the engine did not emit the recorded responses")
        return figures

    def sample(self, prompts: Sequence[Trace], sampling: SamplingSpec, seed: int) -> tuple[Decoding, list[list[int]]]:
        """Let the model sample responses to these prompts; the time includes computing the prompts.

        Returns the figures and the response ids, in the order of the prompts.
        """
        self._sampler.responses = None
        stop_ids = end_of_sequence_ids(self._directory)
        names = []
        for number, trace in enumerate(prompts):
            drafts = draft_args(PromptId(trace.prompt_id), trace.step)
            parameters = sampling_params(sampling, seed + number, stop_ids, drafts)
            names.append(self._submit(trace, parameters))
        figures, emitted = self._finish()
        return figures, [emitted[name] for name in names]

    def _finish(
        self, pause: Callable[[], None] | None = None, *, every: int = 0
    ) -> tuple[Decoding, dict[str, list[int]]]:
        """Run until every request has ended, with a pause after every `every` tokens.

        Returns the figures, and the response ids by request name.
        """
        already, rows_before = self._sampler.num_emitted(), self._sampler.num_row_forwards
        drafted_before = self._sampler.num_drafted
        num_forwards, outputs, began = 0, [], time.process_time()
        num_ended, goal = 0, already + every
        while self.engine.has_unfinished_requests():
            ended = self.engine.step()
            outputs += ended
            num_forwards += 1
            num_ended += sum(len(output.outputs[0].token_ids) for output in ended)
            if pause is not None and num_ended + self._sampler.num_emitted() >= goal:
                pause()
                goal += every
        cpu_s = time.process_time() - began
        self.engine.step()  # the runner removes finished rows in the next step
        emitted = {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
        figures = Decoding(
            cpu_s=cpu_s,
            num_tokens=sum(len(ids) for ids in emitted.values()) - already,
            num_forwards=num_forwards,
            num_row_forwards=self._sampler.num_row_forwards - rows_before,
            num_drafted=self._sampler.num_drafted - drafted_before,
        )
        return figures, emitted

    def _add(self, number: int, trace: Trace) -> str:
        parameters = SamplingParams(
            temperature=1.0,
            seed=number,
            logprobs=0,
            flat_logprobs=True,
            max_tokens=len(trace.response_ids),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={PROMPT_KEY: prompt_key(trace.prompt_id), RESPONSE: number},
        )
        return self._submit(trace, parameters)

    def _submit(self, trace: Trace, parameters: SamplingParams) -> str:
        self._num_requests += 1
        prompt = {"type": "token", "prompt_token_ids": trace.prompt_ids.tolist()}
        self.engine.add_request(str(self._num_requests), prompt, parameters)
        return str(self._num_requests)

    def _waits_for_prompts(self, num_requests: int) -> bool:
        batch = self.worker.model_runner.input_batch
        rows = len(batch.req_ids)
        lengths, prompts = batch.num_tokens_no_spec[:rows], batch.num_prompt_tokens[:rows]
        return rows < num_requests or not bool((lengths > prompts).all())
