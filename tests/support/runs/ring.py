"""The ring without a run around it: a trainer of two ranks and two engines as actors, and a publisher."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray

from launcher.cluster.processes import START_TIMEOUT_S, Processes
from megatron_rl.config import AlgorithmConfig, OptimizerConfig, ParallelConfig, PublishConfig, TrainerConfig
from megatron_rl.controller.delivery import ColocatedDelivery, ShmDelivery, StreamingDelivery, WeightDelivery
from megatron_rl.controller.publish_report import PublishReport
from megatron_rl.controller.publisher import Publisher
from megatron_rl.model.spec import read_model_spec
from megatron_rl.ranks import trainer_ranks
from megatron_rl.trainer.group import TrainerGroup
from megatron_rl.trainer.messages import TrainerSpec
from megatron_rl.weights.reshard_plan import plan_reshard
from rollout.config import EngineConfig
from rollout.engine.spec import EngineSpec
from rollout.engine.state import EngineState
from rollout.group_parts import most_parts
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool
from rollout.types import (
    EngineSlot,
    GroupId,
    Prompt,
    PromptGroup,
    PromptId,
    SamplingSpec,
    Score,
    ScoreStatus,
)
from rollout.weights.format import WeightFormat
from tests.support.deadline import DEADLINE_S
from tests.support.scored_groups import scorer_answer

RUN_ID = "ring"
NUM_ENGINES = 2
PARALLEL = ParallelConfig(tensor=2)
PUBLISH = PublishConfig(bucket_bytes=1 << 16)
TEMPERATURE = 1.0
BF16 = WeightFormat(name="bf16")
TIMEOUT_S = DEADLINE_S


@ray.remote(num_cpus=0)
class LastTokenScorer:
    """Rewards a response by the id that it ends with, so that no two rewards need be equal."""

    def alive(self):
        """See `ScorerActor.alive`."""

    def score(self, group, columns):
        last = columns.response_ids[columns.offsets[1:] - 1]
        return scorer_answer(Score(reward=float(token), status=ScoreStatus.OK) for token in last)


@dataclass
class Ring:
    """Versions count up over all tests that share it."""

    directory: str
    trainer: TrainerGroup
    engines: EngineGroup
    pool: EnginePool
    version: int = -1
    num_groups: int = 0

    @classmethod
    def start(cls, running: Processes, directory: str) -> "Ring":
        config = EngineConfig(num_engines=NUM_ENGINES, max_num_seqs=8, kv_cache_bytes=64 << 20, update_timeout_s=30)
        specs = [
            EngineSpec(engine_id=n, run_id=RUN_ID, config=config, directory=directory, max_model_len=128)
            for n in range(NUM_ENGINES)
        ]
        slots = [EngineSlot(engine_id=n, num_ranks=1, cpu_cores=1, num_gpus=0) for n in range(NUM_ENGINES)]
        engines, starting = running.begin_engines(specs, slots)
        spec = TrainerSpec(
            model=directory,
            run_id=RUN_ID,
            config=TrainerConfig(dtype="fp32", parallel=PARALLEL, optimizer=OptimizerConfig(learning_rate=1e-3)),
            algorithm=AlgorithmConfig(group_size=4, filter="none"),
            publish=PUBLISH,
            format=BF16,
            temperature=TEMPERATURE,
            max_response_tokens=128,
            total_updates=100,
            seed=0,
        )
        trainer = running.start_trainer(spec, trainer_ranks(PARALLEL, cpu_threads=1))
        engines.finish_start(starting, timeout_s=START_TIMEOUT_S)
        scorer = LastTokenScorer.remote()
        return cls(directory, trainer, engines, EnginePool(engines, [scorer], seats_per_engine=8))

    def publisher(self, transport: str = "shm", *, max_probe_gap: float = 0.05) -> Publisher:
        """A publisher over `transport`; the delivery that is asked for becomes the one that engines listen to."""
        spec = read_model_spec(Path(self.directory))
        required = self.engines.required(timeout_s=TIMEOUT_S)
        self.trainer.plan_publishes(required)
        plan = plan_reshard(
            spec, PARALLEL, format=BF16, bucket_bytes=PUBLISH.bucket_bytes, uses_te_layer_names=False, required=required
        )
        if transport == "shm":
            delivery: WeightDelivery = ShmDelivery(self.trainer, self.engines, timeout_s=TIMEOUT_S)
        elif transport == "hand over":  # engine 0 beside trainer rank 1, engine 1 beside trainer rank 0
            delivery = ColocatedDelivery(
                self.trainer, self.engines, homes=[[1], [0]], memory="shm", timeout_s=TIMEOUT_S
            )
        else:
            delivery = StreamingDelivery(
                self.trainer, self.engines, source_ranks=plan.source_ranks, timeout_s=TIMEOUT_S
            )
        delivery.connect()
        return Publisher(
            self.trainer,
            self.engines,
            delivery,
            plan=plan,
            run_id=RUN_ID,
            vocab_size=spec.vocab_size,
            probe_length=16,
            max_probe_gap=max_probe_gap,
            timeout_s=TIMEOUT_S,
        )

    def publish(self, publisher: Publisher | None = None) -> PublishReport:
        """Publish the trainer's weights as the next version."""
        self.version += 1
        return (publisher or self.publisher()).publish(self.version)

    def states(self) -> list[EngineState]:
        return list(self.engines.states(timeout_s=TIMEOUT_S).values())

    def groups(self, count: int, *, seeds: Sequence[int] = (0, 1, 2, 3), **sampling: object) -> list[PromptGroup]:
        made = []
        for _ in range(count):
            self.num_groups += 1
            spec = {"temperature": TEMPERATURE, "max_response_tokens": 24} | sampling
            made.append(
                PromptGroup(
                    group_id=GroupId(self.num_groups),
                    step=self.num_groups,
                    prompt=Prompt(
                        prompt_id=PromptId(f"ring/{self.num_groups % 5}"),
                        data_source="ring",
                        token_ids=np.array([5, 9, 17, 30 + self.num_groups % 5], dtype=np.int32),
                        ground_truth="",
                        extra_info_json="null",
                    ),
                    sampling=SamplingSpec(**spec),
                    seeds=tuple(seeds),
                )
            )
        return made

    def sample_on(self, engine: int, group: PromptGroup):
        """(summary, columns) of a group sampled on one engine."""
        return tuple(ray.get(self.begin_on(engine, group), timeout=TIMEOUT_S))

    def begin_on(self, engine: int, group: PromptGroup):
        """The same without waiting for it."""
        # the engine will say that these have ended; a pool takes more than it began for another pool's
        self.pool._seats.begin(engine, len(group.seeds))
        return self.engines.actors[engine].generate_group.options(num_returns=1 + most_parts(group)).remote(group)
