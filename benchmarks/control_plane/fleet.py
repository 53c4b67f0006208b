"""The product's controller over a fleet of stand-ins."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ray
from rich.console import Console

from benchmarks.control_plane.meter import Meter
from benchmarks.control_plane.standins import Handle, Sizes, node_name, start_host
from history.lengths.book import LengthBook
from history.store.service import HistoryService, Upkeep
from launcher.run_dir.console import RunProgress
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.recorder import RunRecorder
from launcher.run_dir.saves import Saves
from launcher.run_dir.status import StatusFile
from launcher.run_dir.wandb import Tracked, Tracker
from megatron_rl.batching.cost_model import CostModel
from megatron_rl.config import AlgorithmConfig, CheckpointConfig, ParallelConfig
from megatron_rl.controller.controller import Controller, LoopSettings
from megatron_rl.controller.delivery import ShmDelivery
from megatron_rl.controller.phases import PhaseClock, Phases
from megatron_rl.controller.publisher import Publisher
from megatron_rl.model.spec import ModelSpec
from megatron_rl.trainer.group import SpmdGroup, TrainerGroup
from megatron_rl.weights.reshard_plan import plan_reshard
from rollout.config import PlannerConfig
from rollout.data.order import PromptOrder, PromptSet
from rollout.planning.planner import Planner
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool
from rollout.pool.evaluator import Evaluator
from rollout.pool.history_client import HistoryClient
from rollout.types import Prompt, PromptId, SamplingSpec
from rollout.weights.format import WeightFormat

TENSOR = 8
"""Tensor-parallel size of trainer and engines."""
PROMPT_TOKENS = 200
TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One scale."""

    num_engines: int
    num_ranks: int
    num_prompts: int
    """Of a step."""
    group_size: int
    num_steps: int


def prompts(count: int) -> dict[PromptId, Prompt]:
    """Different prompts without a text."""
    ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
    names = [PromptId(f"data/{number}") for number in range(count)]
    return {
        name: Prompt(prompt_id=name, data_source="data", token_ids=ids, ground_truth="", extra_info_json="null")
        for name in names
    }


class Fleet:
    """Hosts of stand-ins, and the parts of the product that talk to them."""

    def __init__(self, load: Load, sizes: Sizes, spec: ModelSpec, meter: Meter, directory: RunDirectory) -> None:
        self._load, self._spec, self._meter, self._directory = load, spec, meter, directory
        self._hosts = [start_host(sizes) for _ in range(2)]
        self.engines = EngineGroup(self._handles(range(load.num_engines)), num_ranks=TENSOR)
        ranks = SpmdGroup("trainer", self._handles(range(load.num_ranks)), timeout_s=TIMEOUT_S)
        self.trainer = TrainerGroup(ranks, data_ranks=[rank // TENSOR for rank in range(load.num_ranks)])
        self.scorer = Handle(self._hosts[0], 0)
        self.engines.finish_start(self.engines.begin_start(), timeout_s=TIMEOUT_S)
        readers = {node_name(engine): -1 - engine for engine in range(load.num_engines)}
        service = HistoryService(
            self._handles(range(4)),
            list(readers),
            start_reader=lambda node: self._handles([readers[node]])[0],
            directory="",
            fingerprint="",
            upkeep=Upkeep(log=logging.warning),
        )
        self.history = HistoryClient(service, self.engines)
        self.service = service

    def _handles(self, numbers: Sequence[int]) -> list[Handle]:
        return [Handle(self._hosts[number % len(self._hosts)], number) for number in numbers]

    def controller(self) -> Controller:
        """The loop of a run of `Load.num_steps` steps, measured by its parts."""
        load, meter = self._load, self._meter
        planner, recorder = self._planner(), self._recorder()
        pool = EnginePool(
            self.engines,
            [self.scorer],
            seats_per_engine=64,
            batches=meter.wrap(planner, {}),
            on_start=self.history.started,
        )
        clock = PhaseClock(recorder.record_span)
        policy = SimpleNamespace(trainer_works=nullcontext, engines_work=lambda: None)
        return Controller(
            planner=meter.wrap(planner, {"due": "plan", "consumed": "plan", "upcoming": "plan", "metrics": "plan"}),
            pool=meter.wrap(pool, dict.fromkeys(("admit", "take_batch", "loads", "homes", "planned"), "pool")),
            trainer=meter.wrap(self.trainer, {"train": "train calls"}),
            publisher=meter.wrap(self._publisher(), {"publish": "publish"}),
            phases=Phases(clock, policy=policy),
            evaluator=Evaluator({}, {}, format="int8", seed=0, stop_token_ids=(), run_settings=""),
            recorder=meter.ending_steps(meter.wrap(recorder, {"on_step": "record"})),
            algorithm=AlgorithmConfig(prompts_per_step=load.num_prompts, group_size=load.group_size),
            settings=LoopSettings(
                num_steps=load.num_steps,
                evaluate_every=0,
                checkpoint_every=load.num_steps + 1,
                max_micro_batch_tokens=32768,
                data_parallel=load.num_ranks // TENSOR,
                costs=CostModel(parity_tokens=30000),
                seed=0,
            ),
            restarter=SimpleNamespace(num_restarts=0, num_serving=0, num_lost_nodes=0, restart_lost=lambda **_: 0),
            history=meter.wrap(
                self.history,
                dict.fromkeys(("prefetch", "place", "discard_drafts", "record_rewards", "metrics"), "history"),
            ),
        )

    def _planner(self) -> Planner:
        load = self._load
        known = prompts(load.num_prompts * 4)
        return Planner(
            PromptOrder([PromptSet(prompt_ids=tuple(known))], seed=0),
            known,
            config=PlannerConfig(),
            lengths=LengthBook(),
            num_steps=load.num_steps,
            prompts_per_step=load.num_prompts,
            group_size=load.group_size,
            sampling=SamplingSpec(temperature=1.0, max_response_tokens=32768),
            seed=0,
        )

    def _recorder(self) -> RunRecorder:
        steps = self._load.num_steps
        return RunRecorder(
            self._directory,
            Tracker(None, Path("unused"), Tracked()),
            RunProgress(steps, Console(quiet=True)),
            status=StatusFile(run_dir=self._directory.path, num_steps=steps),
            text_actor=self.scorer,
            engines=self.engines,
            saves=Saves(self._directory, CheckpointConfig(keep_last=1), history=self.service),
            baseline_engines=(),
            table_rows=0,
            record_traces=False,
        )

    def _publisher(self) -> Publisher:
        plan = plan_reshard(
            self._spec,
            ParallelConfig(tensor=TENSOR, data=self._load.num_ranks // TENSOR),
            format=WeightFormat(name="int8", bf16_first_layers=1, bf16_last_layers=1),
            bucket_bytes=256 << 20,
            uses_te_layer_names=False,
        )
        return Publisher(
            self.trainer,
            self.engines,
            ShmDelivery(self.trainer, self.engines, timeout_s=TIMEOUT_S),
            plan=plan,
            run_id="control",
            vocab_size=self._spec.vocab_size,
            probe_length=64,
            max_probe_gap=0.6,
            timeout_s=TIMEOUT_S,
        )

    def end(self) -> None:
        """End the hosts."""
        for host in self._hosts:
            ray.kill(host)
