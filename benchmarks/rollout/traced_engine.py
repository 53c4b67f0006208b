"""One vLLM engine in this process that decodes recorded responses, with the worker and arguments of the product.

Responses are sampled as a rollout's are: at temperature 1, seeded, with their log-probabilities. Only an engine that
drafts as the product does samples as it does; all others, stock ones included, sample as vLLM does. Time is CPU time of
the whole process while it decodes; prompts are computed before the clock starts.
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
from rollout.engine.responses import sampling_params
from rollout.engine.spec import EngineSpec
from rollout.engine.vllm_args import end_of_sequence_ids, engine_arguments
from rollout.types import PromptId, SamplingSpec
from rollout.worker.proposer import PROMPT_KEY
from rollout.worker.worker import Worker

SLICE = 8
"""Tokens that a request alone emits before its engine lets others go on, and so many times the root of their number
that several do: fractions of a second, and what slows a machine down lasts longer."""

Speculation = Mapping[str, object]
"""vLLM's `speculative_config`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """What it took to decode some responses."""

    num_tokens: int
    num_forwards: int
    num_row_forwards: int
    """Rows of all forwards: what the tokens would have taken without drafts."""
    num_drafted: int
    """Draft tokens that were verified."""
    cpu_s: float


def write_model(directory: Path, *, vocabulary: int, hidden: int, layers: int, intermediate: int, heads: int) -> None:
    """Write the `config.json` of a Qwen3 model whose weights are made up when it is loaded."""
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
        spec: as in the product.
        speculation: instead of the product's own.
    """
    arguments = engine_arguments(spec)
    if speculation is not None:
        arguments.speculative_config = dict(speculation)
    engine = LLMEngine.from_engine_args(arguments)
    return engine, cast(Worker, engine.engine_core.engine_core.model_executor.driver_worker.worker)


class TracedEngine:
    """An engine that emits what it is told to, or samples for itself."""

    def __init__(self, spec: EngineSpec, speculation: Speculation | None = None) -> None:
        self.engine, self.worker = start_engine(spec, speculation)
        if speculation is not None or spec.drafts is None:
            del self.worker.model_runner._sample  # ours, in the place of the class's
        self._sampler = ForcedSampler(self.worker.model_runner)
        self._directory = spec.directory
        self._num_requests = 0

    def decode(self, traces: Sequence[Trace], pause: Callable[[], None] | None = None) -> Decoding:
        """Decode these responses in one batch, each up to its last token.

        Args:
            traces: their prompts and responses.
            pause: returns when it is this engine's turn; called before the clock starts and after every `SLICE`.

        Raises:
            RuntimeError: the engine emitted something else.
        """
        self._sampler.responses = [trace.response_ids for trace in traces]
        names = [self._add(number, trace) for number, trace in enumerate(traces)]
        while self._waits_for_prompts(len(traces)):
            self.engine.step()
        if pause is not None:
            pause()
        took, emitted = self._finish(pause, every=round(SLICE * len(traces) ** 0.5))
        if emitted != {name: trace.response_ids.tolist() for name, trace in zip(names, traces, strict=True)}:
            raise RuntimeError("the engine did not emit the recorded responses")
        return took

    def sample(self, prompts: Sequence[Trace], sampling: SamplingSpec, seed: int) -> tuple[Decoding, list[list[int]]]:
        """Have the model answer these prompts itself (their responses are not looked at), prompts included in the time.

        Returns what it took and the response ids, in the order of the prompts.
        """
        self._sampler.responses = None
        stop_ids = end_of_sequence_ids(self._directory)
        names = []
        for number, trace in enumerate(prompts):
            parameters = sampling_params(sampling, seed + number, stop_ids, PromptId(trace.prompt_id), trace.step)
            names.append(self._submit(trace, parameters))
        took, emitted = self._finish()
        return took, [emitted[name] for name in names]

    def _finish(
        self, pause: Callable[[], None] | None = None, *, every: int = 0
    ) -> tuple[Decoding, dict[str, list[int]]]:
        """Run until every request has ended, with a pause after `every` so many tokens.

        Returns what that took, and the response ids of each by its name.
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
        self.engine.step()  # a runner keeps finished rows until it is told
        emitted = {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
        took = Decoding(
            cpu_s=cpu_s,
            num_tokens=sum(len(ids) for ids in emitted.values()) - already,
            num_forwards=num_forwards,
            num_row_forwards=self._sampler.num_row_forwards - rows_before,
            num_drafted=self._sampler.num_drafted - drafted_before,
        )
        return took, emitted

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
