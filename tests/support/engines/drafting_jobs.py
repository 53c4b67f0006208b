"""Emits responses of engines with and without drafts, as a script in its own process.

One process holds many engines one after another. Reads checkpoints from the folder named first, writes a pickled
dictionary, `Emitted` by name of the job, to the file named second.
"""

import dataclasses
import gc
import os
import pickle
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np

from history.drafting.stats import DraftStats
from rollout.config import EngineConfig
from rollout.engine.spec import DraftSpec, EngineSpec
from rollout.types import PromptId, SamplingSpec

VOCABULARY = 256
MAX_MODEL_LEN = 256
NUM_PROMPTS, NUM_SAMPLED = 64, 12
"""Prompts that are sampled from, and tokens of each response."""
BLOCK = 128
"""Tokens of a block of the key-value cache on CPU: a prompt of one token more can be cached but for its last token."""


TEMPERATURES = (1.0, 0.7)
MANY, FEW = 80, 20
"""Samples of each prompt. An accepted padding of a draft is 7 standard deviations at `MANY` samples and 3 at `FEW`; a
random temperature is above 100 at 10. So one kind and temperature has `MANY`, and the others have `FEW`."""

QUIRKS = {
    "drafted_rows_are_sampled_at_a_random_temperature": ("expand_batch_to_tokens", FEW),
    "padding_of_a_draft_is_accepted": ("_rejection_random_sample", MANY),
}
"""Workarounds without which sampling is wrong: their place in vLLM's rejection sampler, and samples that show it."""


@dataclass(frozen=True)
class Kind:
    """Of an engine."""

    name: str
    format: str
    dtype: str


KINDS = (
    Kind("bf16", "bf16", "bfloat16"),
    Kind("int8", "int8", "bfloat16"),
    Kind("fp32", "bf16", "float32"),
)
SAMPLED_KINDS = KINDS[:2]
IN_SMALL_BATCHES = "-in-small-batches"
SMALL_BATCH, NUM_IN_SMALL_BATCHES = 7, 63
"""Requests at a time, and requests in all, that show how much the composition of a batch changes log-probabilities."""


@dataclass(frozen=True)
class Emitted:
    """Responses in the order of the requests, and the draft statistics of their engine."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    stats: DraftStats


@dataclass(frozen=True)
class Order:
    prompt_id: str
    prompt: list[int]
    sampling: SamplingSpec
    seed: int


def greedy_orders() -> list[Order]:
    """Prompts of many lengths; some end at a block boundary and some reach the engine's maximum length."""
    dice, max_tokens = random.Random(7), 48
    orders = []
    for number in range(128):
        length = dice.choice([dice.randrange(4, 60), BLOCK + 1, MAX_MODEL_LEN - max_tokens])
        prompt = [dice.randrange(3, VOCABULARY - 1) for _ in range(length)]
        sampling = SamplingSpec(temperature=0.0, max_response_tokens=max_tokens)
        orders.append(Order(f"greedy/{number}", prompt, sampling, seed=number))
    return orders


def sampled_orders(temperature: float, samples: int) -> list[Order]:
    """Siblings whose prompts are cached except for one token, so that the scheduler pads their first draft."""
    dice = random.Random(8)
    sampling = SamplingSpec(temperature=temperature, max_response_tokens=NUM_SAMPLED)
    prompts = [[dice.randrange(3, VOCABULARY - 1) for _ in range(BLOCK + 1)] for _ in range(NUM_PROMPTS)]
    return [
        Order(f"sampled/{number}", prompts[number], sampling, seed=1 + number + NUM_PROMPTS * sample)
        for sample in range(samples)
        for number in range(NUM_PROMPTS)
    ]


def num_samples(kind: Kind, temperature: float) -> int:
    """Samples of each prompt by an engine with drafts."""
    return MANY if (kind, temperature) == (KINDS[0], TEMPERATURES[0]) else FEW


def engine(root: Path, kind: Kind, *, drafts: DraftSpec | None = None):
    """A synchronous engine with the product's arguments; only the number format is chosen by the test."""
    from vllm import LLM, EngineArgs

    from rollout.engine.vllm_args import engine_arguments

    config = EngineConfig(format=kind.format, kv_cache_bytes=64 << 20, max_num_seqs=64)
    spec = EngineSpec(
        engine_id=0,
        run_id="test",
        config=config,
        directory=str(root / kind.format),
        max_model_len=MAX_MODEL_LEN,
        load_from_directory=True,
        drafts=drafts,
    )
    arguments = engine_arguments(spec)
    arguments.dtype = kind.dtype
    if arguments.speculative_config is not None:
        arguments.speculative_config["model"] = "tests.support.engines.eager_proposer.EagerProposer"
    return LLM(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(EngineArgs)})


def emit(llm, orders: list[Order], *, at_once: int) -> Emitted:
    from rollout.engine.responses import draft_args, sampling_params

    found = []
    for start in range(0, len(orders), at_once):
        batch = orders[start : start + at_once]
        params = [sampling_params(o.sampling, o.seed, (), draft_args(PromptId(o.prompt_id), 0)) for o in batch]
        found += llm.generate([{"prompt_token_ids": o.prompt} for o in batch], params, use_tqdm=False)
    (stats, *_) = llm.collective_rpc("draft_stats")
    return Emitted(
        tokens=[list(each.outputs[0].token_ids) for each in found],
        logprobs=[list(each.outputs[0].logprobs.logprobs) for each in found],
        stats=pickle.loads(stats),
    )


def publish(folder: Path, orders: list[Order], tokens: list[list[int]]) -> str:
    """A history of earlier responses, a tenth of it edited: substitutions, insertions, deletions."""
    from history.index.segment import build_segment, write_segment
    from history.types import PastResponse, prompt_key

    dice = random.Random(9)
    folder.mkdir()
    by_prompt: dict[str, list[PastResponse]] = {}
    for order, response in zip(orders, tokens, strict=True):
        edited: list[int] = []
        for token in response:
            other = dice.randrange(VOCABULARY)
            edited += dice.choice([[other], [token, other], []]) if dice.random() < 0.1 else [token]
        siblings = by_prompt.setdefault(order.prompt_id, [])
        ids = np.array(edited, dtype=np.int32)
        siblings.append(PastResponse(token_ids=ids, step=0, sample=len(siblings)))
    for prompt_id, responses in by_prompt.items():
        key = prompt_key(prompt_id)
        write_segment(folder, build_segment(key, 1, responses))
    return str(folder)


class Jobs:
    """Runs one engine after another and collects their responses."""

    def __init__(self, root: Path) -> None:
        from vllm.v1.sample import rejection_sampler

        self.root = root
        self.found: dict[str, Emitted] = {}
        # vLLM for devices has no `_rejection_random_sample`
        self._originals = {name: getattr(rejection_sampler, name, None) for name, _ in QUIRKS.values()}
        self._collect, gc.collect = gc.collect, lambda *args: 0  # vLLM collects eight times per engine

    def run(
        self, orders: dict[str, list[Order]], kind: Kind, drafts: DraftSpec | None = None, *, by_vllm: bool = False
    ) -> None:
        """Run the named jobs one after another on one engine, sampled by us or by vLLM."""
        from vllm.platforms import current_platform

        from rollout.worker import sampler

        with patch.object(sampler, "install", (lambda runner: None) if by_vllm else sampler.install):
            llm = engine(self.root, kind, drafts=drafts)
        for name, of_job in orders.items():
            self.found[name] = emit(
                llm, of_job, at_once=SMALL_BATCH if name.endswith(IN_SMALL_BATCHES) else len(of_job)
            )
        del llm
        # vLLM would register its kernels again for each engine, and cannot once numba has been imported
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
        self._collect()

    def greedy(self, kind: Kind) -> None:
        orders, stock = greedy_orders(), f"greedy-{kind.name}-stock"
        few = orders[:NUM_IN_SMALL_BATCHES]
        self.run({stock: orders, f"{stock}{IN_SMALL_BATCHES}": few}, kind, by_vllm=True)
        segments = publish(self.root / f"history-greedy-{kind.name}", orders, self.found[stock].tokens)
        drafts = DraftSpec(max_draft_tokens=8, segments_dir=segments)
        self.run({f"greedy-{kind.name}-drafted": orders}, kind, drafts)

    def sampled(self, kind: Kind) -> None:
        from vllm.platforms import current_platform
        from vllm.v1.sample import rejection_sampler

        from rollout.cpu import quirks

        past = {f"sampled-{kind.name}-{at}-stock": sampled_orders(at, samples=FEW) for at in TEMPERATURES}
        self.run(past, kind)
        (first, orders), *_ = past.items()
        segments = publish(self.root / f"history-sampled-{kind.name}", orders, self.found[first].tokens)
        drafts = DraftSpec(max_draft_tokens=4, segments_dir=segments)
        self.run(
            {
                f"sampled-{kind.name}-{at}-drafted": sampled_orders(at, samples=num_samples(kind, at))
                for at in TEMPERATURES
            },
            kind,
            drafts,
        )
        if kind is not KINDS[0]:
            return
        for quirk, (replaced, samples) in QUIRKS.items() if current_platform.is_cpu() else ():
            kept = getattr(quirks, quirk), getattr(rejection_sampler, replaced)
            setattr(quirks, quirk, lambda: None)
            setattr(rejection_sampler, replaced, self._originals[replaced])
            name = f"sampled-{kind.name}-1.0-without-{quirk}"
            self.run({name: sampled_orders(1.0, samples=samples)}, kind, drafts, by_vllm=True)
            setattr(quirks, quirk, kept[0])
            setattr(rejection_sampler, replaced, kept[1])


def main() -> None:
    jobs = Jobs(Path(sys.argv[1]))
    for kind in KINDS:
        jobs.greedy(kind)
    for kind in SAMPLED_KINDS:
        jobs.sampled(kind)
    Path(sys.argv[2]).write_bytes(pickle.dumps(jobs.found))
    sys.stdout.flush()
    os._exit(0)  # nothing of vLLM's is worth taking down in order


if __name__ == "__main__":
    from tests.support.engines import drafting_jobs  # pickled classes carry the module's name

    drafting_jobs.main()
