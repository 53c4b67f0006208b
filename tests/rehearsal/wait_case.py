"""Where the host waits for a device: once for drafted tokens, and neither in the sampler without drafts nor in the
forwards and backwards of dense layers.

torch itself counts the operations that wait (`torch.cuda.set_sync_debug_mode`); stand-ins are left out.
"""

import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from megatron_rl.config import ParallelConfig
from megatron_rl.model import parallel
from megatron_rl.trainer.trainer import Trainer
from rollout.worker.sampler import TokenSampler
from tests.megatron_rl.trainer.test_trainer import batch_for, trainer_spec
from tests.rehearsal.stages import stage
from tests.rehearsal.trainer_case import ONE
from tests.rollout.worker.test_sampler import draft_metadata, metadata_of
from tests.support.trainers.tiny_megatron_models import save_model

VOCABULARY, ROWS = 1000, 8
LOADING = {"learner.py": 1}
"""A copy of a micro batch's lengths, after the last backward of a step."""
MOST_WAITS = {"blocks": LOADING, "expert_blocks": LOADING | {"moe_utils.py": 4}}
"""By family and file: of a micro batch. Megatron's dispatch of tokens waits twice in each of the two layers."""


def waits(action: Callable[[], object]) -> list[str]:
    """The places at which the host waited for the device."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            action()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    sites = [f"{each.filename}:{each.lineno}" for each in found if "called a synchronizing" in str(each.message)]
    # code that torch has compiled contains the stand-in of `cat`, which waits
    return [site for site in sites if "torchinductor" not in site]


def count() -> None:
    assert len(waits(lambda: float(torch.zeros(1, device="cuda")))) == 1


def on_device(record: object) -> object:
    """A copy whose tensors are on the device."""
    moved = {field.name: getattr(record, field.name) for field in fields(record)}
    return replace(record, **{name: value.cuda() for name, value in moved.items() if isinstance(value, torch.Tensor)})


def sample(drafts: list[list[int]] | None) -> None:
    """vLLM's own functions read drafted tokens here: what is on the host needs no stand-in."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    sampling = on_device(metadata_of([0.9] * ROWS, seeds=dict.fromkeys(range(ROWS), 5)))
    lengths = [len(draft) + 1 for draft in drafts or [[]] * ROWS]
    batch = SimpleNamespace(
        sampling_metadata=sampling, num_reqs=ROWS, num_tokens_no_spec=np.full(ROWS, 20, dtype=np.int32)
    )
    runner = SimpleNamespace(
        input_batch=batch, sampler=SimpleNamespace(logprobs_mode="processed_logprobs"), _sample=None
    )
    metadata = None if drafts is None else draft_metadata(drafts, "cuda")
    logits = torch.zeros(sum(lengths), VOCABULARY, device="cuda")
    outputs = []
    found = waits(lambda: outputs.append(TokenSampler(runner).sample(logits, metadata)))
    (output,) = outputs
    if drafts is not None:
        assert not output.sampled_token_ids.is_cuda and not output.logprobs_tensors.logprobs.is_cuda
        tokens, of_tokens = output.sampled_token_ids, output.logprobs_tensors
        found += waits(lambda: RejectionSampler.parse_output(tokens, VOCABULARY, logprobs_tensors=of_tokens))
    most = 0 if drafts is None else 1
    assert len(found) <= most, f"sampler and reader of drafted tokens wait more than {most} times: {found}"


def train(trainer: Trainer, max_tokens: int) -> tuple[int, list[str]]:
    """Micro batches of a step, and where the host waited."""
    batch = batch_for(ParallelConfig(), ONE, max_tokens=max_tokens).of_rank(0)
    return len(batch.mini_batches[0].micro_batches), waits(lambda: trainer.train(batch, lambda refs: refs))


def learn(family: str, folder: Path) -> None:
    directory = save_model(family, folder / family, dtype=torch.bfloat16)
    spec = trainer_spec(directory, ParallelConfig(), ONE, distributed=True)
    config = spec.config.model_copy(update={"dtype": "bf16"})
    trainer = Trainer(replace(spec, config=config), position)
    train(trainer, 400)
    few, many = train(trainer, 400), train(trainer, 40)
    sites = [Counter(Path(site).name.partition(":")[0] for site in places) for _, places in (few, many)]
    each = {file: (count - sites[0][file]) / (many[0] - few[0]) for file, count in sites[1].items()}
    found = {file: count for file, count in each.items() if count}
    print(f"{family}: waits of a micro batch: {found}")
    assert all(count <= MOST_WAITS[family].get(file, 0) for file, count in found.items()), (found, many[1])


if __name__ == "__main__":
    stage("a wait is counted", count)
    stage("the sampler without drafts", lambda: sample(None))
    stage("the sampler with drafts", lambda: sample([[1, 2, 3], [], [4], *([[5, 6]] * (ROWS - 3))]))
    place = Path(tempfile.mkdtemp())
    store = torch.distributed.FileStore(str(place / "store"), 1)
    position = parallel.initialize(ParallelConfig(), rank=0, store=store, timeout_s=60, seed=0)
    for name in MOST_WAITS:
        stage(f"micro batches of {name}", lambda name=name: learn(name, place))
    sys.stdout.flush()
    os._exit(0)  # libraries wait for the driver at exit
