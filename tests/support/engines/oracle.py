"""Answers of vLLM with weights from its own loader, and after a push: a script in its own process.

One process holds many engines one after another (0.2 s each after the first), which AsyncLLM cannot do. Reads a list
of jobs as JSON from its first argument's path, writes answers as JSON to its second.
"""

import gc
import json
import pickle
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import load_file

from tests.support.deadline import DEADLINE_S

PROMPTS = [[5, 9, 17, 33, 65, 129, 3, 200], [7] * 3, list(range(40, 80))]
PROBE = list(range(10, 42))
NUM_TOKENS = 20


@dataclass
class Job:
    """One engine, its sequence of checkpoints, and the disturbances to apply."""

    name: str
    format: str
    directories: list[str]
    """Loaded by vLLM if there is one; pushed in this order into an engine with dummy weights if there are more."""
    without_quirk: str = ""
    onednn: bool = False
    """Take oneDNN's INT8 kernel, which CPUs without VNNI have."""
    answers: list[dict] = field(default_factory=list)


def answer(llm) -> dict:
    from vllm import SamplingParams

    answers: dict = {"tokens": [], "logprobs": []}
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0, detokenize=False, ignore_eos=True)
    for prompt in PROMPTS:
        (out,) = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        ids = list(out.outputs[0].token_ids)
        answers["tokens"].append(ids)
        answers["logprobs"].append([d[t].logprob for t, d in zip(ids, out.outputs[0].logprobs, strict=True)])
    forced = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (out,) = llm.generate([{"prompt_token_ids": PROBE}], forced, use_tqdm=False)
    answers["probe"] = [d[t].logprob for t, d in zip(PROBE[1:], out.prompt_logprobs[1:], strict=True)]
    return answers


def push(llm, directory: str, version: int, format: str) -> None:
    push_tensors(llm, load_file(Path(directory) / "model.safetensors"), version, format)


def push_tensors(llm, tensors: dict, version: int, format: str) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    from rollout.transports.shm import ShmSender
    from rollout.weights.announcement import Announcement
    from rollout.worker.receiver import UpdateOrder
    from tests.support.engines.packing import RUN_ID, pack, stacked

    tensors = stacked(tensors)
    required = recorded(llm, tensors)
    publish = pack(tensors, version, format, num_ranks=2, required=required)
    publish.manifest.check()
    for rank, boxes in enumerate(required):
        publish.manifest.check_required(rank, boxes)
    senders = [ShmSender(run_id=RUN_ID, rank=rank) for rank in range(2)]
    segments = {rank: publish.send(sender, rank) for rank, sender in enumerate(senders)}
    announced = Announcement(plan=f"plan {version}", weight_version=version)
    llm.collective_rpc("hold_manifest", args=(pickle.dumps((announced, publish.manifest)),))
    order = UpdateOrder(announced=announced, segments=segments, timeout_s=DEADLINE_S)
    llm.collective_rpc("expect_weights", args=(pickle.dumps(order),))
    llm.start_weight_update()
    llm.update_weights(WeightTransferUpdateRequest(update_info={"weight_version": version}))
    llm.finish_weight_update()
    llm.reset_prefix_cache()
    assert recorded(llm, tensors) == required  # recording leaves the engine's model in place
    for sender in senders:
        sender.abandon()


def sum_gaps(llm, directories: list[str], directory: str, format: str, version: int) -> dict[str, list]:
    """Size and place of the largest fingerprint difference after each fault of the experts.

    The right weights are in place again afterwards.
    """
    from rollout.weights.fingerprint_sums import add_up, difference
    from tests.support.engines.packing import stacked
    from tests.support.engines.weight_faults import OF_EXPERTS, meant

    tensors = load_file(Path(directory) / "model.safetensors")
    other = next(one for one in directories if one != directory)
    old = load_file(Path(other) / "model.safetensors")
    found = {}
    for number, fault in enumerate([*OF_EXPERTS][::-1]):  # the right ones last
        push_tensors(llm, OF_EXPERTS[fault](tensors, old), version + number, format)
        counted = {(name, box) for name, one in stacked(tensors).items() for box in whole_matrices(one)}
        llm.collective_rpc("count", args=(pickle.dumps([counted]),))
        (sums,) = llm.collective_rpc("loaded_fingerprint")
        found[fault] = list(difference(pickle.loads(sums), add_up([meant(tensors)])))
    return found


def blocks_changed_by_probe(llm) -> int:
    """Changed blocks of the key-value caches; their content is lost."""

    def fill(worker) -> None:
        for cache in worker.model_runner.kv_caches:
            cache.fill_(1.5)

    def changed(worker) -> int:
        return sum(int((cache != 1.5).flatten(1).any(1).sum()) for cache in worker.model_runner.kv_caches)

    llm.collective_rpc(fill)
    llm.collective_rpc("probe", args=(PROBE,))
    (found,) = llm.collective_rpc(changed)
    llm.reset_prefix_cache()
    return found


def recorded(llm, tensors) -> list[dict]:
    """Boxes of these tensors that the rank's loaders read; one rank reads all of them."""
    from rollout.weights.manifest import TensorSpec

    specs = tuple(
        TensorSpec(name=name, shape=tuple(one.shape), dtype=str(one.dtype).removeprefix("torch."))
        for name, one in tensors.items()
    )
    found = [pickle.loads(rank) for rank in llm.collective_rpc("required", args=(pickle.dumps(specs),))]
    assert found == [{name: tuple(whole_matrices(one)) for name, one in tensors.items()}]
    return found


def whole_matrices(tensor) -> list:
    """Boxes of a tensor that is loaded whole: for a stack, one for each expert."""
    from rollout.weights.manifest import Box

    if tensor.dim() < 3:
        return [Box(start=(0,) * tensor.dim(), shape=tuple(tensor.shape))]
    return [Box(start=(expert, 0, 0), shape=(1, *tensor.shape[1:])) for expert in range(len(tensor))]


def routers(directory: str) -> list[str]:
    """Router modules of a checkpoint: they are BF16 in every format."""
    names = load_file(Path(directory) / "model.safetensors")
    return [name.removesuffix(".weight") for name in names if name.endswith(".mlp.gate.weight")]


def run(job: Job) -> None:
    from vllm import LLM
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
    from vllm.model_executor.kernels.linear.scaled_mm import cpu
    from vllm.model_executor.layers import rotary_embedding
    from vllm.platforms import current_platform

    import rollout.worker.worker  # noqa: F401  the quirks are installed by it
    from rollout.cpu import quirks
    from rollout.engine.vllm_args import quantization_config
    from rollout.transports.base import ShmChannel
    from rollout.worker import exact_int8

    kept = (cpu.check_cpu_sgl_kernel, cpu.ops.create_onednn_scaled_mm, getattr(quirks, job.without_quirk, None))
    kept_check = exact_int8.check_vllm_kernel
    if job.onednn:  # also if its products are inexact: the job measures changes by a reload, not the products
        cpu.check_cpu_sgl_kernel = lambda *args: False
        exact_int8.check_vllm_kernel = lambda: exact_int8.KernelCheck(kernel="oneDNN", error=0.0)
    if job.without_quirk:
        setattr(quirks, job.without_quirk, lambda *args: None)
    fresh = len(job.directories) == 1
    quantization = quantization_config(job.format, routers(job.directories[0]))
    overrides = {} if fresh or job.format == "bf16" else {"quantization_config": quantization}
    llm = LLM(
        job.directories[0],
        skip_tokenizer_init=True,
        # on devices reloads must keep what captured graphs read; Inductor is left out, as it compiles for half a minute
        enforce_eager=current_platform.is_cpu(),
        compilation_config={} if current_platform.is_cpu() else {"mode": 0, "cudagraph_mode": "FULL"},
        max_num_seqs=256 if current_platform.is_cpu() else 8,
        gpu_memory_utilization=0.9 if current_platform.is_cpu() else 0.01,
        dtype="bfloat16",
        max_model_len=256,
        kv_cache_memory_bytes=32 << 20,
        load_format="auto" if fresh else "dummy",
        hf_overrides=overrides,
        worker_cls="rollout.worker.worker.Worker",
        weight_transfer_config={"backend": "megatron_rl"},
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    if fresh:
        job.answers.append(answer(llm))
    else:
        llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"channel": pickle.dumps(ShmChannel())}))
        for version, directory in enumerate(job.directories):
            push(llm, directory, version, job.format)
            found = answer(llm) | {"kernels": llm.collective_rpc("kernel_classes")[0]}
            if "experts" in directory and not job.without_quirk:
                found |= {"sum_gaps": sum_gaps(llm, job.directories, directory, job.format, 100 * version + 100)}
            job.answers.append(found | {"blocks_changed_by_probe": blocks_changed_by_probe(llm)})
    del llm
    # Engines of a process share rotary embeddings. vLLM 0.25 makes their tables part of a model's state in a reload,
    # and the next engine without weights fills that with random numbers.
    rotary_embedding._ROPE_DICT.clear()
    # vLLM would register its kernels again for each engine, and cannot once an engine in FP8 has imported numba
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    cpu.check_cpu_sgl_kernel, cpu.ops.create_onednn_scaled_mm = kept[:2]
    exact_int8.check_vllm_kernel = kept_check
    if job.without_quirk:
        setattr(quirks, job.without_quirk, kept[2])


def main() -> None:
    collect = gc.collect
    gc.collect = lambda *args: 0  # vLLM collects eight times per engine, a third of a second each
    jobs = [Job(**job) for job in json.loads(Path(sys.argv[1]).read_text())]
    for job in jobs:
        run(job)
        collect()
    Path(sys.argv[2]).write_text(json.dumps([asdict(job) for job in jobs]))


if __name__ == "__main__":
    main()
