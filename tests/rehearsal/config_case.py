"""vLLM accepts our arguments for models of real shapes, and chooses what we count on: `config_case MODEL`.

MODEL is a folder of `examples/recipes/models`. Every format, with and without drafts, every sleep level, one to eight
ranks: runner, scheduling, CUDA graphs, tokens of a forward and bytes of keys and values.
"""

import itertools
import os
import sys
from pathlib import Path
from typing import get_args

from rollout.processes import ProcessEnv

os.environ.update(ProcessEnv(single_node=True).engine(threads=1))

from vllm import envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.usage.usage_lib import UsageContext

from megatron_rl.model.spec import read_model_spec
from rollout.config import EngineConfig, Format, KvFormat
from rollout.engine.spec import DraftSpec, EngineSpec
from rollout.engine.vllm_args import WORKER, engine_arguments
from tests.rehearsal.stages import stage

MODELS = Path(__file__).parents[2] / "examples" / "recipes" / "models"
MAX_DRAFT_TOKENS = 8
KV_BYTES = 8 << 30
LARGEST_GRAPH = {False: 512, True: 2043}
"""Tokens of the largest graph without and with drafts: vLLM's own, and 227 x 9, the last multiple below 2,048."""


def spec_of(
    model: str, format: Format, drafts: bool, sleep_level: int, ranks: int, kv_format: KvFormat = "bf16"
) -> EngineSpec:
    return EngineSpec(
        engine_id=0,
        run_id="rehearsal",
        config=EngineConfig(
            format=format,
            kv_format=kv_format,
            tensor_parallel=ranks,
            sleep_level=sleep_level,
            max_num_seqs=256,
            kv_cache_bytes=KV_BYTES,
        ),
        directory=str(MODELS / model),
        max_model_len=22_528,
        drafts=DraftSpec(max_draft_tokens=MAX_DRAFT_TOKENS) if drafts else None,
    )


def check(config: VllmConfig, spec: EngineSpec) -> None:
    most = spec.config.forward_tokens(0 if spec.drafts is None else MAX_DRAFT_TOKENS)
    graphs = config.compilation_config
    sizes = list(graphs.cudagraph_capture_sizes)
    found = {
        "the first model runner": not envs.VLLM_USE_V2_MODEL_RUNNER,
        "asynchronous scheduling only without drafts": config.scheduler_config.async_scheduling == (not spec.drafts),
        "tokens of a forward": config.scheduler_config.max_num_batched_tokens == most,
        "room for every draft": most >= 256 * (1 + (MAX_DRAFT_TOKENS if spec.drafts else 0)),
        "whole graphs where rows are equal": graphs.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE,
        "sizes of graphs": max(sizes) == LARGEST_GRAPH[spec.drafts is not None],
        "sizes of graphs, when the KV cache is sized": _sizes_at_last(config) == sizes,
        "bytes of keys and values": config.cache_config.kv_cache_memory_bytes == KV_BYTES,
        "format of keys and values": config.cache_config.cache_dtype.startswith("fp8")
        == (spec.config.kv_format == "fp8"),
        "sleep": config.model_config.enable_sleep_mode == (spec.config.sleep_level > 0),
        "ranks": config.parallel_config.tensor_parallel_size == spec.config.tensor_parallel,
        "the worker": config.parallel_config.worker_cls == WORKER,
    }
    wrong = [name for name, holds in found.items() if not holds]
    assert not wrong, f"{wrong}: {config.scheduler_config}, {graphs}"


def _sizes_at_last(config: VllmConfig) -> list[int]:
    """The sizes of graphs with which the model runner works; changes the configuration as the runner does."""
    graphs = config.compilation_config
    if config.speculative_config is not None:
        multiple = 1 + config.speculative_config.num_speculative_tokens
        graphs.adjust_cudagraph_sizes_for_spec_decode(multiple, config.parallel_config.tensor_parallel_size)
    return graphs.cudagraph_capture_sizes


def main(model: str) -> None:
    heads = read_model_spec(MODELS / model)
    divides = [ranks for ranks in (1, 4, 8) if heads.num_heads % ranks == heads.num_kv_heads % ranks == 0]
    in_fp8 = spec_of(model, "bf16", drafts=True, sleep_level=0, ranks=1, kv_format="fp8")
    stage("bf16, keys and values in FP8", lambda: check(_config(in_fp8), in_fp8))
    for format in get_args(Format):
        for drafts, sleep_level, ranks in itertools.product((False, True), (0, 1, 2), divides):
            spec = spec_of(model, format, drafts, sleep_level, ranks)
            name = f"{format}, {'drafts' if drafts else 'no drafts'}, sleep level {sleep_level}, {ranks} ranks"
            stage(name, lambda spec=spec: check(_config(spec), spec))


def _config(spec: EngineSpec) -> VllmConfig:
    return engine_arguments(spec).create_engine_config(UsageContext.ENGINE_CONTEXT)


if __name__ == "__main__":
    main(*sys.argv[1:])
