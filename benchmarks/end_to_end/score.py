"""Held-out accuracies of saved weights, sampled by one stock vLLM, so that all stacks are scored by one program.

`python -m benchmarks.end_to_end.score --model DIR --held-out FILE --seed N --out FILE STEP=DIR ...` reads Hugging
Face directories. The engine samples with vLLM's sampler in BF16 and drafts nothing. A problem has the same seed for all
weights of all arms, so differences between arms are less noisy than the accuracies.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.end_to_end.model import CONTEXT
from benchmarks.end_to_end.peers import task

MOST_TOKENS = 640
"""Of a held-out response; a careful answer has at most 420."""
MOST_REQUESTS = 256
PROMPT_TOKENS = 128
KV_CACHE_BYTES = 1 << 29
_SEEDS_APART = 1_000_000


class Scorer:
    """A stock vLLM engine in this process."""

    def __init__(self, model: Path, held_out: Path, seed: int) -> None:
        """Problems are those of the file `held_out`; `seed` is the run's."""
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        os.environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        from transformers import AutoTokenizer
        from vllm import LLM, SamplingParams

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        problems = task.prompts(str(held_out))
        self._answers = [problem.answer for problem in problems]
        self._prompts = [{"prompt_token_ids": task.prompt_ids(self._tokenizer, problem)} for problem in problems]
        self._params = [
            SamplingParams(temperature=1.0, max_tokens=MOST_TOKENS, seed=seed * _SEEDS_APART + number, detokenize=False)
            for number in range(len(problems))
        ]
        self._llm = LLM(
            model=str(model),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=CONTEXT,
            max_num_seqs=MOST_REQUESTS,
            # vLLM cannot seed a request on a CPU whose prompt is read in parts
            enable_chunked_prefill=False,
            max_num_batched_tokens=MOST_REQUESTS * PROMPT_TOKENS,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
        )

    def accuracy(self, weights: Path) -> float:
        """Share of the problems that the weights of a Hugging Face directory answer rightly."""
        from safetensors.torch import load_file

        def tensors() -> Iterator[tuple[str, object]]:
            for path in sorted(weights.glob("*.safetensors")):
                for name, value in load_file(path).items():
                    yield name, value.bfloat16()

        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors()})
        self._llm.reset_prefix_cache()
        outputs = self._llm.generate(self._prompts, self._params, use_tqdm=False)
        texts = [self._tokenizer.decode(each.outputs[0].token_ids, skip_special_tokens=True) for each in outputs]
        rewards = [task.score(text, answer) for text, answer in zip(texts, self._answers, strict=True)]
        return sum(rewards) / len(rewards)


def main(argv: Sequence[str] | None = None) -> int:
    """Write a JSON object with the accuracy of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="tokenizer, configuration and first weights")
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("weights", nargs="+", metavar="STEP=DIR")
    options = parser.parse_args(argv)
    scorer = Scorer(options.model, options.held_out, options.seed)
    found = {}
    for step, _, directory in (each.partition("=") for each in options.weights):
        found[step] = scorer.accuracy(Path(directory))
        print(f"step {step}: {found[step]:.4f}", flush=True)
    options.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
