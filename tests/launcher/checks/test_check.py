import json
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from history.lengths.book import KEPT_VISITS, most_bytes
from launcher.checks.check import check_eval, check_run, check_sft
from launcher.checks.model import hosted_state_problems
from launcher.cluster.node import NodeResources
from launcher.config.loading import load
from launcher.config.schema import EvalConfig, RunConfig, SftConfig
from launcher.errors import ConfigError, LaunchError, judging_user_input
from megatron_rl.config import OptimizerConfig, TrainerConfig
from tests.launcher.conftest import NUM_ROWS
from tests.launcher.estimate.runs import tightest

Write = Callable[[str], Path]


def refusal(path: Path, node: NodeResources, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        check_run(load(RunConfig, path, overrides), [node])
    return str(refused.value)


def test_a_valid_configuration_passes(write_config: Write, node: NodeResources) -> None:
    table = tightest(check_run(load(RunConfig, write_config("")), [node]).memory)
    assert 0 < table.needed_bytes < table.available_bytes == node.available_bytes


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["sampling.top_p=0.9"], ["`sampling.top_p` = 0.9", "need 1"]),
        (["sampling.top_k=20"], ["`sampling.top_k` = 20", "need 0"]),
        (["deterministic=true", "engine.num_engines=2"], ["`deterministic` = true", "`engine.num_engines` = 2"]),
        (["deterministic=true", "planner.policy=flexible"], ["`deterministic` = true", "`planner.policy` = flexible"]),
        (["algorithm.num_mini_batches=7"], ["= 64 groups", "`algorithm.num_mini_batches` = 7", "a divisor of 64"]),
        (["algorithm.num_mini_batches=128"], ["`algorithm.prompts_per_step` = 64 groups", "a divisor of 64"]),
        (["trainer.parallel.data=3"], ["512", "`trainer.parallel.data` = 3"]),
        (["algorithm.group_size=1"], ["`algorithm.group_size` = 1", "2 or more"]),
        (
            ["algorithm.correction.mode=icepop", "algorithm.correction.low=3"],
            ["`algorithm.correction.low` = 3.0", "`algorithm.correction.cap` = 2.0"],
        ),
        (
            ["algorithm.correction.mode=icepop_sequence", "algorithm.correction.low=2"],
            ["`algorithm.correction.low` = 2.0", "keeps weights between the two"],
        ),
        (
            ["algorithm.correction={mode: icepop, low: 0.2, cap: 0.28}"],
            [
                "`algorithm.correction.low` = 0.2 with `algorithm.correction.cap` = 0.28: mode icepop keeps ratios",
                "without the ratio 1 of equal log-probabilities; set cap above 1 and low below 1",
            ],
        ),
        (
            ["algorithm.correction={mode: mis_geometric, low: 0.5, cap: 0.9}"],
            ["`algorithm.correction.cap` = 0.9: mode mis_geometric keeps ratios", "without the ratio 1"],
        ),
        (
            ["algorithm.correction={mode: mis_product, low: 2, cap: 5}"],
            ["`algorithm.correction.low` = 2 with", "mode mis_product keeps ratios", "without the ratio 1"],
        ),
        (
            ["algorithm.correction.cap=0.2"],
            ["`algorithm.correction.cap` = 0.2: mode tis_token truncates", "set cap above 1 (2 is common)"],
        ),
        (
            ["algorithm.correction={mode: tis_sequence, cap: 0.99}"],
            ["`algorithm.correction.cap` = 0.99: mode tis_sequence truncates"],
        ),
        (
            ["algorithm.correction.rejections=[{statistic: seq_mean_k3, low: 0.9, high: 1.1}]"],
            ["`algorithm.correction.rejections[0].low` = 0.9: seq_mean_k3 is 0 for equal", "the key has no effect"],
        ),
        (
            ["algorithm.correction.rejections=[{statistic: seq_mean_k1, high: 0.01}]"],
            ["rejections[0]`: seq_mean_k1 keeps ratios from 100 to 0.01", "set high above 1 and low below 1"],
        ),
        (
            ["algorithm.correction.rejections=[{statistic: token_k1, high: 4, low: 2}]"],
            ["rejections[0]`: token_k1 keeps ratios from 2 to 4, without the ratio 1"],
        ),
        (["algorithm.correction.veto_ratio=1e4"], ["`algorithm.correction.veto_ratio` = 10000", "far below 1"]),
        (["algorithm.loss.dual_clip=0.5"], ["`algorithm.loss.dual_clip` = 0.5", "set dual_clip above 1"]),
        (
            ["algorithm.loss=gspo"],
            ["`algorithm.loss` = gspo with `algorithm.aggregation` = token_mean", "set aggregation to sequence_mean"],
        ),
        (["algorithm.loss=gmpo"], ["`algorithm.loss` = gmpo", "set aggregation to sequence_mean"]),
        (
            ["algorithm.loss=bypass"],
            ["`algorithm.loss` = bypass with `algorithm.correction.mode` = tis_token", "set mode to none"],
        ),
        (
            ["algorithm.correction.preset=bypass_pg_is"],
            ["`algorithm.correction.preset` = bypass_pg_is with `algorithm.loss` = clipped_surrogate", "reinforce"],
        ),
        (
            ["trainer.critic.warmup_steps=2"],
            ["`trainer.critic` is set, but no function of the algorithm reads values"],
        ),
        (
            ["algorithm.advantage=gae", "trainer.critic.warmup_steps=9", "num_steps=9"],
            ["`trainer.critic.warmup_steps` = 9 with `num_steps` = 9", "the policy would never learn"],
        ),
        (
            ["algorithm.advantage=gae", "trainer.critic.model=nowhere"],
            ["nowhere"],
        ),
        (["trainer.reference.place=device"], ["`trainer.reference` is set, but nothing reads the reference policy"]),
        (
            ["algorithm.kl.place=loss", "trainer.reference.refresh_every=5", "trainer.fp8=blockwise_param"],
            ["`trainer.reference.refresh_every` = 5 with `trainer.fp8` = blockwise_param"],
        ),
        (
            ["algorithm.kl.place=reward"],
            ["`algorithm.kl.place` = reward with `algorithm.advantage` = grpo", "discounted_returns or gae"],
        ),
        (
            [
                "algorithm.kl.place=reward",
                "algorithm.advantage=tests.megatron_rl.algorithm.own_functions.above_quantile",
            ],
            ["above_quantile: this advantage is computed before the reference policy has scored a token"],
        ),
        (
            ["algorithm.kl.place=reward", "algorithm.kl.estimator=k3_unbiased"],
            ["k3_unbiased: the probability ratio of the old policy is 1"],
        ),
        (
            ["algorithm.advantage=discounted_returns", "algorithm.group_size=1"],
            [
                "`algorithm.filter` = zero_variance: the rewards of a group of one are always equal",
                "set filter to none",
            ],
        ),
        (
            ["algorithm.advantage=discounted_returns"],
            [
                "`algorithm.advantage` = discounted_returns and `algorithm.filter` = zero_variance: the filter would "
                "drop groups of equal rewards",
                "set filter to none, or to accuracy",
            ],
        ),
        (["algorithm.advantage=gae"], ["`algorithm.advantage` = gae and `algorithm.filter` = zero_variance"]),
        (
            ["algorithm.max_refill=2", "algorithm.filter=none", "algorithm.advantage=gae"],
            ["`algorithm.filter` = none", "set filter to accuracy (or zero_variance with an advantage over groups)"],
        ),
        (
            ["algorithm.kl.coefficient=0.01"],
            [
                "`algorithm.kl.coefficient` = 0.01 with `algorithm.kl.place` = none: no divergence is computed",
                "set `algorithm.kl.place` to loss or reward, or leave algorithm.kl out",
            ],
        ),
        (["algorithm.kl.horizon=99"], ["`algorithm.kl.horizon` = 99 with `algorithm.kl.place` = none"]),
        (
            ["algorithm.kl.place=loss", "algorithm.kl.coefficient=0", "algorithm.kl.target=0.02"],
            ["`algorithm.kl.coefficient` = 0 with `algorithm.kl.target` = 0.02", "set it above 0"],
        ),
        (
            ["algorithm.correction={mode: tis_token, cap: 2.0}", "algorithm.correction.preset=decoupled_seq_is"],
            [
                "`algorithm.correction.preset` = decoupled_seq_is with `algorithm.correction.mode` = tis_token: the "
                "preset sets tis_sequence",
                "set `algorithm.correction={preset: decoupled_seq_is}`",
                "or `algorithm.correction={mode: tis_token, cap: 2.0}` to keep",
            ],
        ),
        (
            ["algorithm.correction.rejections=[]", "algorithm.correction.preset=decoupled_k3_rs"],
            ["`algorithm.correction.rejections` = []: the preset sets [{statistic: seq_mean_k3, high: 0.01}]"],
        ),
        (
            ["algorithm.max_refill=2", "algorithm.advantage=tests.megatron_rl.algorithm.own_functions.of_batch"],
            ["of_batch: its advantages are known once all groups of the step are", "set max_refill to 0"],
        ),
        (
            ["algorithm.group_size=1", "algorithm.advantage=tests.megatron_rl.algorithm.own_functions.of_tokens"],
            ["of_tokens and `algorithm.filter` = zero_variance", "set filter to none"],
        ),
        (
            ["algorithm.entropy.coefficient=0.2", "algorithm.entropy.target=1"],
            ["`algorithm.entropy.coefficient` = 0.2 is above `algorithm.entropy.max_coefficient` = 0.1"],
        ),
        (
            ["algorithm.advantage=tests.megatron_rl.algorithm.own_functions.one_parameter"],
            ["own_functions.one_parameter has the parameters (outcome)"],
        ),
        (
            [
                "algorithm.advantage.name=tests.megatron_rl.algorithm.own_functions.above_quantile",
                "algorithm.advantage.sahre=0.3",
            ],
            ["unknown key `algorithm.advantage.sahre`; did you mean `share`? its settings: share"],
        ),
        (
            ["algorithm.reward_shaping=overlong"],
            ["`algorithm.reward_shaping.buffer_tokens` = 4096", "`sampling.max_response_tokens` = "],
        ),
        (["algorithm.advantage=dr_grpo"], ["set aggregation to seq_mean_token_sum_norm"]),
        (
            ["engine.kv_format=fp8", "publish.in_flight=keep_kv"],
            ["`engine.kv_format` = fp8", "`publish.in_flight` = keep_kv", "set in_flight to recompute"],
        ),
        (
            ["engine.sleep_level=2", "publish.in_flight=drain"],
            ["`publish.in_flight` = drain", "`engine.sleep_level` = 2", "or sleep_level to 0"],
        ),
        (
            ["publish.probe_tokens=4096"],
            [
                "`publish.probe_tokens` = 4096: an engine scores the probe in one forward, which holds 2048 tokens",
                "the longest response) has 192 tokens; lower it below 192",
            ],
        ),
        (["evaluation.sets.train.path=nowhere.jsonl"], ["`evaluation.sets.train` has the name of a training file"]),
        (
            ["data.train.0.name=math", "evaluation.sets.train.path=nowhere.jsonl"],
            ["`evaluation.sets.train` would be taken for training"],
        ),
        (
            ["data.train=[{path: a/train.jsonl}, {path: b/train.jsonl}]"],
            ["`data.train.1.path` = b/train.jsonl has the name train, as a/train.jsonl", "set `data.train.1.name`"],
        ),
        (["trainer.optimizer.min_learning_rate=1"], ["min_learning_rate` = 1.0", "learning_rate` = 1e-06"]),
        (
            [
                *("algorithm.advantage=gae", "trainer.critic.optimizer.decay_steps=2"),
                "trainer.critic.optimizer.warmup_steps=3",
            ],
            ["`trainer.critic.optimizer.decay_steps` = 2", "`trainer.critic.optimizer.warmup_steps` = 3"],
        ),
        (
            ["trainer.optimizer.min_learning_rate=1e-7", "trainer.optimizer.decay_steps=5"],
            [
                "`trainer.optimizer.min_learning_rate` = 1e-07 with `trainer.optimizer.decay` = constant",
                "set decay to linear or cosine, or decay_steps to 0",
            ],
        ),
        (["trainer.parallel.tensor=3"], ["trainer.parallel.tensor = 3", "4 attention heads"]),
        (["trainer.parallel.pipeline=5"], ["pipeline = 5", "4 layers"]),
        (["engine.tensor_parallel=4"], ["`engine.tensor_parallel` = 4", "2 key/value heads"]),
        (["sampling.max_response_tokens=500"], ["64 + `sampling.max_response_tokens` 500 = 564", "512 positions"]),
        (["engine.kv_cache_bytes=1000"], ["`engine.kv_cache_bytes` = 1000", "raise it"]),
        (["data.train.0.path=nowhere.jsonl"], ["`data.train.0.path` = nowhere.jsonl", "no such file"]),
        (["evaluation.sets.held.path=nowhere.jsonl"], ["`evaluation.sets.held.path` = nowhere.jsonl"]),
        (["reward.function=no_such.module.score"], ["`reward.function` = no_such.module.score", "no module"]),
        (
            ["planner.tail_engines=1"],
            ["`planner.tail_engines` = 1", "`engine.num_engines` = 1: no engine is left"],
        ),
        (["planner.overlap=1"], ["`planner.max_staleness` = 0 is below 1", "`planner.overlap` = 1"]),
        (
            ["planner.overlap=1", "planner.head_start=0.2", "planner.max_staleness=1"],
            ["`planner.max_staleness` = 1 is below 2", "`planner.head_start` = 0.2"],
        ),
        (["planner.policy=flexible", "planner.head_start=0.2"], ["`planner.head_start` = 0.2", "flexible"]),
        (
            ["deterministic=true", "planner.overlap=1", "planner.max_staleness=1"],
            ["`deterministic` = true", "`planner.overlap` = 1"],
        ),
        (
            ["algorithm.max_refill=0.01", "algorithm.filter=accuracy"],
            ["`algorithm.max_refill` = 0.01 with `algorithm.prompts_per_step` = 64", "nothing would be replaced"],
        ),
        (
            ["algorithm.max_refill=2", "algorithm.filter=none", "planner.policy=flexible"],
            ["`algorithm.max_refill` = 2.0", "`algorithm.filter` = none", "`planner.policy` = flexible"],
        ),
        (
            ["algorithm.max_refill=2", "algorithm.advantage=reinforce_plus_plus"],
            ["`algorithm.max_refill` = 2.0", "`algorithm.advantage` = reinforce_plus_plus", "none can be judged alone"],
        ),
        (
            ["algorithm.max_refill=2", "planner.head_start=0.2", "planner.max_staleness=1", "deterministic=true"],
            ["`planner.head_start` = 0.2", "`planner.max_staleness` = 1", "no checkpoint holds them"],
        ),
        (
            ["placement.mode=disaggregated", "publish.transport=cuda_ipc"],
            ["disaggregated", "`publish.transport` = cuda"],
        ),
        (["placement.mode=disaggregated", "engine.sleep_level=1"], ["disaggregated", "`engine.sleep_level` = 1"]),
        (["publish.transport=nccl"], ["`publish.transport` = nccl", "`placement.mode` = colocated"]),
        (["history.baseline_engines=[1]"], ["`history.baseline_engines` names engine 1", "`engine.num_engines` = 1"]),
        (
            ["algorithm.prompts_per_step=4096"],
            ["a step may sample 4096 groups", "of 1024 prompts in `data.train`", "lower them, or add prompts"],
        ),
        (
            ["algorithm.max_refill=20", "algorithm.filter=accuracy"],
            ["a step may sample 1344 groups (`algorithm.prompts_per_step` x (1 + `algorithm.max_refill`)) of 1024"],
        ),
        (["data.train=[]"], ["a step may sample 64 groups", "of 0 prompts in `data.train`"]),
        (
            ["sampling.stop_token_ids=[0, -1, 255, 256]"],
            ["`sampling.stop_token_ids` names -1, 256: the ids of the model's tokens go from 0 to 255"],
        ),
        (["history.warm_start=nowhere"], ["`history.warm_start` = nowhere", "manifest.json", "jsonl"]),
        (["model=nowhere"], ["`model` = nowhere", "no such directory"]),
    ],
)
def test_impossible_combinations_are_refused_naming_both_values(
    write_config: Write, node: NodeResources, overrides: list[str], said: list[str]
) -> None:
    text = refusal(write_config(""), node, *overrides)
    assert all(part in text for part in said), text
    assert len(text.splitlines()) < 24


def test_parts_of_gpus_are_refused_where_a_run_would_use_them(write_config: Write, node: NodeResources) -> None:
    part = replace(node, name="gpu-01", gpu_problem="CUDA_VISIBLE_DEVICES = MIG-1: MIG-1 is a part of a GPU")
    assert "gpu-01: CUDA_VISIBLE_DEVICES = MIG-1" in refusal(write_config(""), part)


def test_all_problems_are_reported_at_once(write_config: Write, node: NodeResources) -> None:
    text = refusal(
        write_config(""), node, "sampling.top_p=0.9", "trainer.parallel.tensor=3", "data.train.0.path=x.jsonl"
    )
    assert text.startswith("configuration: ")
    assert all(key in text for key in ("top_p", "tensor = 3", "x.jsonl"))


def test_too_little_memory_is_refused_naming_the_best_change(write_config: Write, node: NodeResources) -> None:
    small = replace(node, available_bytes=4 << 30)
    text = refusal(write_config(""), small, "engine.kv_cache_bytes=8589934592")
    assert "in `all phases`, but 4.00 GiB are available; `engine.kv_cache_bytes` = 4294967296 frees 4.00 GiB" in text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "2 + 2", "answer": ', "line 3: not valid JSON"),
        ('{"answer": "4"}', "line 3: `prompt` None must be text"),
        ('{"prompt": "2 + 2"}', "line 3: no ground truth"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    write_config: Write, node: NodeResources, tmp_path: Path, line: str, said: str
) -> None:
    path = write_config("")
    (tmp_path / "train.jsonl").write_text(f'{{"prompt": "1 + 1", "answer": "2"}}\n\n{line}\n')
    text = refusal(path, node)
    assert f"`data.train.0.path`: {tmp_path / 'train.jsonl'}, {said}" in text


def test_a_bad_row_of_a_warm_start_is_named_by_file_and_line(
    tmp_path: Path, model_dir: Path, node: NodeResources
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1", "response": "2"}\n{"prompt": "1"}\n')
    settings = {"path": str(data), "max_tokens": 64}
    config = SftConfig.model_validate({"model": str(model_dir), "output_dir": "out", "data": settings, "num_steps": 1})
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 2: a row must be an object with `prompt` and `response`"):
        check_sft(config, [node])


def test_a_warm_start_looks_for_flash_attention(
    tmp_path: Path, model_dir: Path, node: NodeResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1", "response": "2"}\n')
    settings = {"path": str(data), "max_tokens": 64}
    output = str(tmp_path / "out")
    config = SftConfig.model_validate({"model": str(model_dir), "output_dir": output, "data": settings, "num_steps": 1})
    ampere = replace(node, gpu_bytes=(80 << 30,), gpu_capability=(8, 0))
    without = check_sft(config, [ampere])
    assert any("attention scores" in line for line in without.memory.lines())
    (warning,) = without.warnings
    assert "`flash-attn` 2.1.1 to 2.8.3" in warning
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "2.8.3" if name == "flash-attn" else version(name))
    present = check_sft(config, [ampere])
    assert not any("attention scores" in line for line in present.memory.lines())
    assert present.warnings == ()


def test_a_long_run_without_checkpoints_is_warned_of_what_a_failure_repeats(
    write_config: Write, node: NodeResources
) -> None:
    def warnings(*overrides: str) -> list[str]:
        found = check_run(load(RunConfig, write_config(""), overrides), [node]).warnings
        return [warning for warning in found if "`checkpoint.every`" in warning]

    assert warnings("num_steps=99") == warnings("num_steps=500", "checkpoint.every=20") == []
    assert len(warnings("num_steps=100")) == 1
    (warning,) = warnings("num_steps=500")
    assert "saves after the last of 500 steps only" in warning and "set it to 20, for example" in warning


def test_a_directory_without_weights_or_tokenizer_is_refused(
    write_config: Write, node: NodeResources, model_dir: Path
) -> None:
    path = write_config("")
    (model_dir / "model.safetensors").unlink()
    (model_dir / "tokenizer.json").unlink()
    text = refusal(path, node)
    assert "holds no *.safetensors" in text
    assert "holds no tokenizer" in text


def test_offloading_and_sleep_are_refused_on_a_cpu(write_config: Write, node: NodeResources) -> None:
    hosted = "trainer.optimizer.states_on_host=true"
    text = refusal(write_config(""), node, "engine.sleep_level=2", "trainer.offload=all", "publish.delta=true", hosted)
    assert "`engine.sleep_level` = 2: only engines on GPUs sleep" in text
    assert "`trainer.offload` = all: a trainer on a CPU cannot be offloaded" in text
    assert "`trainer.optimizer.states_on_host` = true: a trainer on a CPU has all its memory there" in text
    assert "`engine.sleep_level` = 2 with `publish.delta` = true" in text


def test_states_in_host_memory_need_the_layout_that_is_read_in_place() -> None:
    hosted = OptimizerConfig(states_on_host=True)
    both = OptimizerConfig(states_on_host=True, distributed=True)
    gpu = NodeResources(cpu_cores=4, available_bytes=1 << 34, gpu_bytes=(80 << 30,))
    (problem,) = hosted_state_problems(TrainerConfig(optimizer=hosted), gpu)
    assert "`trainer.optimizer.states_on_host` = true with `trainer.optimizer.distributed` = false" in problem
    assert not hosted_state_problems(TrainerConfig(optimizer=both), gpu)


def test_experts_are_not_distributed_over_tensor_ranks_on_a_cpu(
    write_config: Write, node: NodeResources, model_dir: Path
) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    (model_dir / "config.json").write_text(json.dumps(config | more | {"model_type": "qwen3_moe"}))
    keys = [f"trainer.parallel.{key}=2" for key in ("tensor", "data", "expert")]
    assert "gloo cannot gather the tokens" in refusal(write_config(""), node, *keys)


def test_experts_in_8_bits_are_refused_on_a_cpu(write_config: Write, node: NodeResources, model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    (model_dir / "config.json").write_text(json.dumps(config | more | {"model_type": "qwen3_moe"}))
    text = refusal(write_config(""), node, "engine.format=int8")
    assert "`engine.format` = int8" in text
    assert "the model has 4 experts, and vLLM multiplies experts in 8 bits on GPUs only; set it to bf16" in text


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": {"vocab": {"a": 0, "b": 256}}},
        {"model": {"vocab": [["a", 0.0]] * 257}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 256, "content": "x"}]},
    ],
)
def test_a_tokenizer_with_ids_beyond_the_model_is_refused(
    write_config: Write, node: NodeResources, model_dir: Path, tokenizer: dict[str, object]
) -> None:
    path = write_config("")
    (model_dir / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has ids up to 256, but the model's vocab_size is 256" in refusal(path, node)


def test_a_remote_error_about_the_users_input_is_one_screen() -> None:
    class RemoteError(ValueError):
        def __init__(self) -> None:
            super().__init__("ray::TextActor()\nTraceback ...\nValueError: row 3 is bad")
            self.cause = ValueError("row 3 is bad")

    with pytest.raises(LaunchError, match=r"^row 3 is bad$"), judging_user_input():
        raise RemoteError


def test_a_warm_start_that_would_overwrite_its_model_is_refused(
    tmp_path: Path, model_dir: Path, node: NodeResources
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1", "response": "2"}\n')
    config = SftConfig.model_validate(
        {"model": str(model_dir), "output_dir": str(model_dir), "data": {"path": str(data)}, "num_steps": 1}
    )
    with pytest.raises(ConfigError, match=r"(?s)`data.max_tokens` = 1024.*512 positions.*is the model itself"):
        check_sft(config, [node])


def test_an_evaluation_of_repeated_greedy_samples_is_refused(tmp_path: Path, model_dir: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1", "answer": "2"}\n')
    one = {"path": str(data), "samples_per_prompt": 4, "max_response_tokens": 64}
    config = EvalConfig.model_validate({"model": str(model_dir), "sets": {"a": one}, "max_prompt_tokens": 64})
    with pytest.raises(ConfigError, match=r"`sets.a.samples_per_prompt` = 4 with temperature 0"):
        check_eval(config)


def test_an_evaluation_with_a_stop_token_that_the_model_lacks_is_refused(tmp_path: Path, model_dir: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1", "answer": "2"}\n')
    sets = {"a": {"path": str(data), "max_response_tokens": 64}}
    values = {"model": str(model_dir), "sets": sets, "max_prompt_tokens": 64, "stop_token_ids": (7, 256)}
    config = EvalConfig.model_validate(values)
    with pytest.raises(ConfigError, match=r"`stop_token_ids` names 256: .* from 0 to 255"):
        check_eval(config)


def test_a_run_of_endless_steps_keeps_lengths_of_the_prompts_that_there_are(
    write_config: Write, node: NodeResources
) -> None:
    gpu = replace(node, gpu_bytes=(80 << 30,), gpu_capability=(9, 0), available_bytes=1 << 36)
    memory = check_run(load(RunConfig, write_config(""), ["num_steps=10000000"]), [gpu]).memory
    (lengths,) = {
        item
        for table in memory.tables
        for items in table.phases.values()
        for item in items
        if item.what == "lengths of responses"
    }
    assert lengths.num_bytes == most_bytes(num_visits=KEPT_VISITS * NUM_ROWS, visit_responses=8)
    assert lengths.knob == "num_steps"


def test_training_files_with_the_same_file_name_need_names(
    write_config: Write, node: NodeResources, tmp_path: Path
) -> None:
    path = write_config("")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    files = f"{{path: {tmp_path}/a/train.jsonl}}, {{path: {tmp_path}/b/train.jsonl"
    assert f"{tmp_path}/b/train.jsonl has the name train" in refusal(path, node, f"data.train=[{files}}}]")
    named = load(RunConfig, path, [f"data.train=[{files}, name: b}}]", "algorithm.prompts_per_step=2"])
    assert check_run(named, [node]).config.data.train[1].name == "b"


def test_problems_of_the_environment_are_listed_beside_those_of_the_configuration(
    write_config: Write, node: NodeResources
) -> None:
    with pytest.raises(ConfigError, match=r"2 problems\s+- no key\s+- `sampling.top_k` = 20"):
        check_run(load(RunConfig, write_config(""), ["sampling.top_k=20"]), [node], ["no key"])


def test_an_evaluation_has_neither_a_memory_plan_nor_a_publish(tmp_path: Path, model_dir: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1", "answer": "2"}\n')
    one = {"path": str(data), "max_response_tokens": 64}
    engine = {"gpu_memory_fraction": 0.9, "kv_format": "fp8"}
    config = EvalConfig.model_validate(
        {"model": str(model_dir), "sets": {"a": one}, "max_prompt_tokens": 64, "engine": engine}
    )
    with pytest.raises(ConfigError, match=r"no memory plan; set\s+`engine.kv_cache_bytes` instead") as error:
        check_eval(config)
    assert "`engine.kv_format` = fp8: a publish sets its scales" in str(error.value)


def test_an_evaluation_whose_forward_is_too_small_is_refused(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.checks.check.engine_arguments", lambda engine: ([], []))
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1", "answer": "2"}\n')
    sets = {"a": {"path": str(data), "max_response_tokens": 64}}
    engine = {"vllm": {"max_num_batched_tokens": 127, "enable_chunked_prefill": False}}
    config = EvalConfig.model_validate(
        {"model": str(model_dir), "sets": sets, "max_prompt_tokens": 64, "engine": engine}
    )
    with pytest.raises(ConfigError, match=r"the longest sequence, of 128 tokens, and holds 127"):
        check_eval(config)
