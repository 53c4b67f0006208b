"""A matrix that the trainer itself packs wrongly: its sums are wrong alike, so the probe alone can find it.

The sender, the publisher and the engine's protocol are the real code. Only vLLM is replaced: `transformers` computes
the probe from the sent codes, and an independent function their sums.
"""

import asyncio
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.config import ParallelConfig, PublishConfig
from megatron_rl.controller.delivery import DeliveryReport
from megatron_rl.controller.publish_refusal import PublishRefusedError
from megatron_rl.controller.publisher import MAX_WEIGHT_GAP, Publisher, probe_tokens
from megatron_rl.trainer.messages import TrainerProof
from rollout.config import EngineConfig
from rollout.engine.responses import ResponseLedger
from rollout.engine.spec import EngineSpec
from rollout.engine.state import EngineStatus
from rollout.engine.weights import EngineWeights
from rollout.types import WeightVersion
from rollout.weights.checkpoint_tensors import expected_tensors
from rollout.weights.format import WeightFormat
from rollout.worker.receiver import Loaded
from tests.megatron_rl.controller.test_publisher import STAGED
from tests.megatron_rl.trainer.test_trainer import ALGORITHMS, assembled, trainer_spec
from tests.support.engines.weight_faults import Tensors, decoded, meant
from tests.support.trainers.memory_sender import MemorySender
from tests.support.trainers.tiny_megatron_models import VOCAB, save_model

FORMAT = "int8"
TOKENS = probe_tokens(VOCAB, PublishConfig().probe_tokens)
LAYER = "model.layers.0."
ROLLED = ["model.embed_tokens.weight", "lm_head.weight", f"{LAYER}self_attn.v_proj.weight"]


def stage_rolled(position, parallel, spec, names):
    """By name, the trainer's proof, filled buckets, nothing and the plan of a publish with that matrix rolled.

    A matrix that Megatron keeps in several parts is rolled in each part.
    """
    from megatron_rl.trainer.trainer import Trainer
    from megatron_rl.weights.packer import WeightPacker, _whole

    trainer = Trainer(spec, position)
    trainer.plan_publishes(())
    packer, outcomes = trainer.publishes.packer, {}
    for name in names:

        def rolled(shard, box, name=name):
            if shard.hf_name != name:
                return WeightPacker._values(packer, shard, box)
            return WeightPacker._values(packer, shard, _whole(shard)).roll(1, 0)[box.slices(shard.hf_start)]

        packer._values = rolled
        sender = MemorySender()
        trainer.stage(WeightVersion(0), sender)
        outcomes[name] = trainer.proof(TOKENS), sender.contents, None, trainer.publishes.plan
    return outcomes


@pytest.fixture(scope="module")
def sent(ranks, tmp_path_factory):
    """Model folder, and what one trainer rank has sent and expects, by the name of the rolled matrix; none for ""."""
    folder = save_model("qwen3", tmp_path_factory.mktemp("model"))
    spec = trainer_spec(folder, ParallelConfig(), ALGORITHMS["one update"], format=FORMAT)
    (outcomes,) = ranks.run(stage_rolled, spec, ["", *ROLLED])
    return folder, outcomes


@pytest.fixture(scope="module")
def logprobs(sent) -> Callable[[Tensors], list[float]]:
    """Log-probabilities of the probe prompt by a model of transformers that holds decoded tensors."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sent[0], dtype=torch.float32).eval()

    def of(tensors: Tensors) -> list[float]:
        model.load_state_dict({name: decoded(tensors, name) for name in model.state_dict()})
        with torch.no_grad():
            scores = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
        return [float(scores[place, token]) for place, token in enumerate(TOKENS[1:])]

    return of


class Ranks:
    """`LlmHandle` of an engine with one rank, which loads whatever was sent."""

    def __init__(self, tensors: Tensors, probe: list[float]) -> None:
        self.tensors, self.logprobs, self.calls = tensors, probe, []
        core = SimpleNamespace(outputs_queue=asyncio.Queue())
        self.llm = SimpleNamespace(engine_core=core, pause_generation=self.pause)

    async def pause(self, *, mode: str, clear_cache: bool) -> None:
        del mode, clear_cache

    async def ranks(self, method: str, *args: object) -> list[object]:
        del args
        self.calls.append(method)
        if method == "apply_weights":
            return [pickle.dumps(Loaded(sums=meant(self.tensors), received_bytes=1))]
        answers = {"weights_arrived": True, "built_model": pickle.dumps(None), "probe": self.logprobs}
        return [answers.get(method)]


class Engines:
    """An `EngineGroup` of one engine in this process."""

    def __init__(self, weights: EngineWeights) -> None:
        self.weights, self.lost = weights, ()

    def check(self, manifest, *, timeout_s):
        self.weights.check(manifest)

    def prove(self, expected, lenience, token_ids, *, timeout_s):
        return {0: asyncio.run(self.weights.prove(expected, lenience, token_ids))}

    def fence(self, faults, *, timeout_s):
        asyncio.run(self.weights.fence(faults[0]))

    def resume(self, *, timeout_s):
        asyncio.run(self.weights.resume())


async def nothing() -> None:
    pass


def publisher_of(folder, outcome, logprobs) -> Publisher:
    """A publisher over what a trainer rank has sent, with the default bounds of an INT8 engine."""
    proof, _, _, plan = outcome
    dtypes = {one.name: getattr(torch, one.dtype) for one in plan.tensors}
    tensors = {name: torch.from_numpy(one).view(dtypes[name]) for name, one in assembled([outcome]).items()}
    config = EngineConfig(format=FORMAT)
    spec = EngineSpec(engine_id=0, run_id="run", config=config, directory=str(folder), max_model_len=64)
    ranks = Ranks(tensors, logprobs(tensors))
    weights = EngineWeights(spec, ranks, ResponseLedger(), sync_vllm=nothing, submit_again=nothing)
    asyncio.run(weights.begin(expected_tensors(str(folder), WeightFormat(name=FORMAT))))

    def deliver(manifest, meanwhile):
        meanwhile()
        return DeliveryReport(staged=(STAGED,), updates=(asyncio.run(weights.update(manifest)),))

    def finish_proof(*, timeout_s) -> TrainerProof:
        return proof

    return Publisher(
        SimpleNamespace(begin_proof=lambda token_ids: None, finish_proof=finish_proof),
        Engines(weights),
        SimpleNamespace(deliver=deliver),
        plan=plan,
        run_id="run",
        vocab_size=VOCAB,
        probe_length=len(TOKENS),
        max_probe_gap=config.max_probe_gap,
        timeout_s=1,
    )


def test_what_the_trainer_packs_rightly_is_served(sent, logprobs):
    folder, outcomes = sent
    publisher = publisher_of(folder, outcomes[""], logprobs)
    report = publisher.publish(0)
    assert publisher._engines.weights.status is EngineStatus.SERVING
    assert report.weight_gaps[0] < MAX_WEIGHT_GAP / 100 and 0 < report.probe_gaps[0] < 0.1


@pytest.mark.parametrize("name", ROLLED)
def test_an_int8_engine_is_fenced_by_the_probe_after_the_sender_has_rolled_a_matrix_by_a_row(sent, logprobs, name):
    folder, outcomes = sent
    right, wrong = (assembled([outcomes[one]])[name] for one in ("", name))
    assert sorted(right.tolist()) == sorted(wrong.tolist()) and not np.array_equal(right, wrong), "rows have moved"
    publisher = publisher_of(folder, outcomes[name], logprobs)
    with pytest.raises(PublishRefusedError, match=r"engine\(s\) \[0\] are fenced: .*probe_max_logprob_gap"):
        publisher.publish(0)
    weights = publisher._engines.weights
    assert weights.status is EngineStatus.FENCED
    with pytest.raises(RuntimeError, match="has no update to serve"):
        asyncio.run(weights.resume())
