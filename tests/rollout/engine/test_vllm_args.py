"""From our configuration to vLLM's arguments."""

import inspect
import json

import pytest
from vllm.config import CompilationConfig
from vllm.platforms.interface import DeviceCapability

from rollout.config import EngineConfig
from rollout.engine import vllm_args
from rollout.engine.spec import DraftSpec, EngineSpec
from rollout.engine.vllm_args import (
    OWNED,
    check_passthrough,
    engine_arguments,
    quantization_config,
)
from rollout.stop_ids import end_of_sequence_ids


def arguments(
    checkpoints, *, load: bool = False, drafts: DraftSpec | None = None, in_flight: str = "recompute", **config: object
):
    spec = EngineSpec(
        engine_id=0,
        run_id="run",
        config=EngineConfig(**config),
        directory=str(checkpoints.path("qwen3", "A", "bf16")),
        max_model_len=123,
        load_from_directory=load,
        in_flight=in_flight,
        drafts=drafts,
    )
    return engine_arguments(spec)


def test_an_engine_starts_with_dummy_weights_and_the_quantised_layout(checkpoints):
    found = arguments(checkpoints, format="int8", max_num_seqs=7, kv_cache_bytes=1 << 25)
    assert found.load_format == "dummy" and found.max_model_len == 123
    assert found.max_num_seqs == 7 and found.kv_cache_memory_bytes == 1 << 25
    group = found.hf_overrides["quantization_config"]["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == "channel" and group["input_activations"]["strategy"] == "token"
    assert found.logprobs_mode == "processed_logprobs" and found.skip_tokenizer_init


def test_each_rank_of_a_tensor_parallel_engine_is_a_process(checkpoints) -> None:
    assert arguments(checkpoints).distributed_executor_backend is None
    several = arguments(checkpoints, tensor_parallel=2)
    assert several.distributed_executor_backend == "mp"
    month_s = 30 * 24 * 3600
    assert (several.distributed_timeout_seconds, several.cpu_distributed_timeout_seconds) == (month_s, month_s)


@pytest.mark.parametrize(("capability", "refused"), [(80, True), (86, True), (89, False), (90, False)])
def test_fp8_is_refused_on_devices_that_only_decompress_it(monkeypatch, capability, refused):
    class Gpu:
        def is_cuda(self) -> bool:
            return True

        def has_device_capability(self, wanted: int) -> bool:
            return capability >= wanted

        def get_device_capability(self) -> DeviceCapability:
            return DeviceCapability(capability // 10, capability % 10)

        def get_device_name(self) -> str:
            return "NVIDIA something"

    monkeypatch.setattr(vllm_args, "current_platform", Gpu())
    for format in ("bf16", "int8"):
        vllm_args.check_device(format)
    if refused:
        with pytest.raises(ValueError, match=rf"fp8_channel.*{capability / 10}.*use int8"):
            vllm_args.check_device("fp8_channel")
    else:
        vllm_args.check_device("fp8_channel")


def test_fp8_by_channel_has_the_layout_of_float_quantized_checkpoints(checkpoints):
    found = arguments(checkpoints, format="fp8_channel").hf_overrides["quantization_config"]
    assert found["format"] == "float-quantized"
    group = found["config_groups"]["group_0"]
    assert group["weights"]["type"] == group["input_activations"]["type"] == "float"


def test_fp8_by_block_has_the_layout_that_vllm_calls_fp8(checkpoints):
    found = arguments(checkpoints, format="fp8_block").hf_overrides["quantization_config"]
    assert found["quant_method"] == "fp8" and found["weight_block_size"] == [128, 128]


@pytest.mark.parametrize(("format", "key"), [("int8", "ignore"), ("fp8_block", "modules_to_not_convert")])
def test_linears_that_stay_bf16_are_listed(format, key):
    found = quantization_config(format, ["model.layers.0.mlp.down_proj"])
    assert found[key] == ["lm_head", "model.layers.0.mlp.down_proj"]


def test_bf16_needs_no_override(checkpoints):
    assert quantization_config("bf16") is None
    assert arguments(checkpoints, format="bf16").hf_overrides == {}


def test_an_engine_that_loads_a_directory_uses_its_own_format(checkpoints):
    found = arguments(checkpoints, load=True, format="int8")
    assert found.load_format == "auto" and found.hf_overrides == {}


def test_fp8_keys_and_values_need_publishes_that_set_their_scales(checkpoints):
    assert arguments(checkpoints).kv_cache_dtype == "auto"
    assert arguments(checkpoints, kv_format="fp8").kv_cache_dtype == "fp8"
    with pytest.raises(ValueError, match=r"kv_format fp8: .* an engine of a directory has none"):
        arguments(checkpoints, kv_format="fp8", load=True)
    with pytest.raises(ValueError, match=r"kv_format fp8: .* publish.in_flight cannot be keep_kv"):
        arguments(checkpoints, kv_format="fp8", in_flight="keep_kv")


def test_the_bound_of_a_probe_has_the_roundings_of_keys_and_values():
    gaps = {"bf16": 0.3, "int8": 0.6}
    assert EngineConfig(probe_max_logprob_gap=gaps, probe_max_kv_gap=0.4).max_probe_gap == 0.3
    of_codes = EngineConfig(probe_max_logprob_gap=gaps, probe_max_kv_gap=0.4, kv_format="fp8")
    assert of_codes.max_probe_gap == pytest.approx(0.5)
    assert EngineConfig(probe_max_logprob_gap={"int8": 2.0}).max_probe_gap == EngineConfig().max_probe_gap
    assert EngineConfig(probe_max_logprob_gap={"int8": 2.0}, format="int8").max_probe_gap == 2.0


def test_figures_of_an_engine_name_the_format_of_its_keys_and_values():
    # evaluations of a run with FP8 keys and values must not be mixed with those of BF16 engines
    assert [EngineConfig(format="bf16", kv_format=each).formats for each in ("bf16", "fp8")] == ["bf16", "bf16_kv_fp8"]


def test_a_baseline_engine_has_no_speculative_config(checkpoints):
    found = arguments(checkpoints)
    assert found.speculative_config is None and found.additional_config["drafts"] is None


def test_an_engine_that_drafts_uses_our_proposer(checkpoints):
    found = arguments(checkpoints, drafts=DraftSpec(max_draft_tokens=9, segments_dir="/dev/shm/x"))
    assert found.speculative_config["method"] == "custom_class"
    assert found.speculative_config["model"] == "rollout.worker.proposer.HistoryProposer"
    assert found.speculative_config["num_speculative_tokens"] == 9
    assert found.additional_config["drafts"] == {"max_draft_tokens": 9, "segments_dir": "/dev/shm/x"}


def test_the_users_vllm_table_is_passed_through(checkpoints):
    assert arguments(checkpoints, vllm={"max_num_batched_tokens": 99}).max_num_batched_tokens == 99


def test_an_unknown_vllm_key_is_refused_naming_the_nearest():
    with pytest.raises(
        ValueError, match=r"engine\.vllm\.max_num_batched_token is no argument .* 'max_num_batched_tokens'"
    ):
        check_passthrough({"max_num_batched_token": 1})


@pytest.mark.parametrize("key", sorted(OWNED))
def test_a_vllm_key_that_we_set_is_refused_naming_our_field(key):
    with pytest.raises(ValueError, match=f"engine.vllm.{key} is set by this program; use "):
        check_passthrough({key: 1})


def test_kept_responses_rule_out_asynchronous_scheduling_whatever_the_users_table_says(checkpoints):
    assert arguments(checkpoints, in_flight="keep_kv").async_scheduling is False
    with pytest.raises(ValueError, match=r"engine\.vllm\.async_scheduling .* use publish\.in_flight"):
        arguments(checkpoints, in_flight="keep_kv", vllm={"async_scheduling": True})


def test_end_of_sequence_ids_are_collected_from_every_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert end_of_sequence_ids(str(tmp_path)) == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert end_of_sequence_ids(str(tmp_path)) == (5, 7)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 3, "content": "<end>"}, {"id": 4, "content": "<pad>"}]})
    )
    assert end_of_sequence_ids(str(tmp_path)) == (3, 5, 7)


def test_a_directory_without_end_of_sequence_id_gives_none(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert end_of_sequence_ids(str(tmp_path)) == ()


class Device:
    """A GPU, as far as arguments ask for it."""

    def is_cuda(self) -> bool:
        return True

    def is_cpu(self) -> bool:
        return False

    def has_device_capability(self, wanted: int) -> bool:
        return True


def test_an_engine_starts_beside_others_on_a_device(checkpoints, monkeypatch) -> None:
    assert arguments(checkpoints).gpu_memory_utilization > 0.5
    monkeypatch.setattr(vllm_args, "current_platform", Device())
    assert arguments(checkpoints).gpu_memory_utilization <= 0.01


@pytest.mark.parametrize(
    ("seats", "draft", "more", "tokens", "largest_graph"),
    [
        (64, 8, {}, 2048, 2043),
        (256, 8, {}, 2304, 2043),
        (256, 16, {}, 4096, 2040),
        (256, 16, {"max_num_batched_tokens": 1024}, 1024, 1020),
        (256, 8, {"enforce_eager": True}, 2304, None),
        (256, 0, {}, 2048, None),
    ],
    ids=["few seats", "many seats", "more than pays", "the user's tokens", "no graphs", "no drafts"],
)
def test_a_forward_on_a_device_takes_a_full_draft_of_every_request_and_has_a_graph(
    checkpoints, monkeypatch, seats, draft, more, tokens, largest_graph
) -> None:
    monkeypatch.setattr(vllm_args, "current_platform", Device())
    drafts = DraftSpec(max_draft_tokens=draft) if draft else None
    found = arguments(checkpoints, drafts=drafts, max_num_seqs=seats, vllm=more)
    assert found.max_num_batched_tokens == tokens
    sizes = found.cudagraph_capture_sizes
    assert (sizes and max(sizes)) == largest_graph


FORWARDS = [64, 300, 512, 1000, 2304, 9000]


def engine_of(tokens: int, **more: int) -> EngineConfig:
    return EngineConfig(max_num_seqs=8, vllm={"max_num_batched_tokens": tokens, **more})


@pytest.mark.parametrize("draft", [1, 2, 4, 8, 16, 31, 63])
@pytest.mark.parametrize("most", FORWARDS)
def test_graph_sizes_end_at_the_last_multiple_in_a_forward_and_pad_little(most: int, draft: int) -> None:
    sizes = vllm_args.graph_sizes(engine_of(most), draft)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max(size for size in range(draft + 1, min(most, 2048) + 1, draft + 1))
    for tokens in range(1, sizes[-1] + 1):
        padded = next(size for size in sizes if size >= tokens)
        step = 8 if tokens <= 256 else 64
        assert padded - tokens < next(size for size in range(draft + 1, 129, draft + 1) if size >= step)
    assert len(sizes) <= 70


@pytest.mark.parametrize("draft", [4, 8, 16, 31])
@pytest.mark.parametrize("most", FORWARDS)
def test_vllm_keeps_the_graph_sizes_when_it_sizes_the_kv_cache(most: int, draft: int) -> None:
    """So the sizes are those with which the drafts are priced, and the largest forwards have graphs."""
    sizes = vllm_args.graph_sizes(engine_of(most), draft)
    found = CompilationConfig(cudagraph_capture_sizes=list(sizes), max_cudagraph_capture_size=sizes[-1])
    round_sizes = found.adjust_cudagraph_sizes_for_spec_decode
    ranks = [1] * (len(inspect.signature(round_sizes).parameters) - 1)  # vLLM 0.25 wants the ranks of an engine too
    round_sizes(draft + 1, *ranks)
    assert found.cudagraph_capture_sizes == sizes
    assert found.max_cudagraph_capture_size == sizes[-1]


def test_a_forward_without_room_for_a_full_draft_is_refused_where_graphs_are_captured() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens 16: .* has 17 tokens.* Raise it to 17"):
        vllm_args.graph_sizes(engine_of(16), 16)
