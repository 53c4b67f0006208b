"""The vLLM worker of this project's engines. Importing this module has side effects on purpose.

vLLM imports the module by name in every worker process (`worker_cls`). So this is the place that registers the weight
receiver and works around faults of vLLM before the first kernel runs. The subclass adds the calls that the engine makes
to its ranks: the two halves of an update that vLLM has no call for, a probe that runs while generation is paused, the
trace of forwards, and the names of the kernels in use.
"""

import logging
import math
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearKernel
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from history.drafting.stats import DraftStats
from rollout.cpu import quirks
from rollout.processes import die_with, write_stacks_on_signal
from rollout.tracing.forwards import ForwardLog, ForwardRecord
from rollout.worker import exact_int8, kv_scales, model_report, sampler, vllm_compat, vllm_quirks
from rollout.worker.proposer import HistoryProposer
from rollout.worker.receiver import BACKEND, BucketReceiver

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker

    from rollout.cpu import fp8_kernels

    fp8_kernels.register()
    quirks.int8_kernel_refuses_rows_that_vllm_offers_it()
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

exact_int8.register()
quirks.first_small_batch_dies_with_illegal_instruction()
quirks.int8_logits_are_uniform_after_reload()
vllm_quirks.reload_complains_about_rotary_embeddings()
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BucketReceiver)

PROBE_ID = "probe"


Clock = Callable[[], Callable[[], float]]
"""Stops the clock when called; the returned function gives the seconds since the start."""


def start_clock() -> Clock:
    """Start a clock for the work submitted from now on: CUDA events on a CUDA device, wall time elsewhere."""
    if not current_platform.is_cuda():
        start = time.perf_counter()
        return lambda: partial(float, time.perf_counter() - start)
    first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    first.record()
    return lambda: _until_event(first)


def _until_event(first: torch.cuda.Event) -> Callable[[], float]:
    last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    last.record()

    def seconds() -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000

    return seconds


class Worker(PlatformWorker):  # type: ignore[misc]
    """One rank of an engine."""

    _log: ForwardLog | None = None
    _under_way: tuple[SchedulerOutput, float, Clock] | None = None
    _is_first_of_version: bool = False
    """Whether no forward has run since weights were applied; what that publish makes responses recompute is no
    preemption."""

    def init_device(self) -> None:
        """Initialise the device; this process ends when its engine's owner ends."""
        owner = self.vllm_config.additional_config.get("owner_pid")
        if owner is not None:
            die_with(owner)
        write_stacks_on_signal()
        # for requests that `sampler` leaves to vLLM's own sampler
        quirks.drafted_rows_are_sampled_at_a_random_temperature()
        quirks.padding_of_a_draft_is_accepted()
        super().init_device()
        if not hasattr(self.model_runner, "input_batch"):
            raise RuntimeError(
                "vLLM has chosen its second model runner, whose batch the sampler and the drafts cannot read: set "
                "VLLM_USE_V2_MODEL_RUNNER=0 in the environment of the engine, as `rollout.processes.ProcessEnv` does"
            )

    def ping(self) -> None:
        """Answer: this rank takes calls."""

    # -- forwards ----------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> object:
        """Run one forward and record it in the forward log."""
        if self._log is None:
            self._log = ForwardLog()
        if (proposer := self._proposer()) is not None:
            proposer.end(scheduler_output.finished_req_ids)
        if scheduler_output.total_num_scheduled_tokens:
            self._under_way = scheduler_output, time.time(), start_clock()
        output = super().execute_model(scheduler_output)
        if output is not None:
            self._close_record()
        return output

    def sample_tokens(self, grammar_output: object) -> object:
        """Sample after a forward and close its record; drafting for the next forward is not part of the record."""
        with vllm_quirks.seeded_request_dies_in_partial_prefill(self.model_runner):
            output = super().sample_tokens(grammar_output)
        self._close_record()
        return output

    def _close_record(self) -> None:
        if self._under_way is not None and self._log is not None:
            order, started_at_s, clock = self._under_way
            preempted = () if self._is_first_of_version else order.preempted_req_ids or ()
            record = _describe(order, started_at_s, clock(), num_preempted=len(preempted))
            self._log.append(record)
            self._under_way, self._is_first_of_version = None, False
            if (proposer := self._proposer()) is not None and _only_decodes(order):
                proposer.observe(record)

    def drain_trace(self) -> bytes:
        """Return the forwards since the last call, as bytes of `rollout.tracing.forwards.FORWARD` records."""
        return b"" if self._log is None else self._log.drain()

    # -- drafts ------------------------------------------------------------------------------------

    def compile_or_warm_up_model(self) -> object:
        """Install the sampler and bind the proposer: after the model is loaded, before the first request."""
        done = super().compile_or_warm_up_model()
        if kv_scales.is_fp8(self.vllm_config):
            kv_scales.attention_layers(self.vllm_config)  # refuses a backend before the first publish
        sampler.install(self.model_runner)
        if (proposer := self._proposer()) is not None and self.rank == 0:
            vllm_quirks.one_request_near_its_end_takes_the_drafts_of_all(self.model_runner)
            proposer.bind(self.model_runner, forward_ended=self._close_record)
        return done

    def draft_stats(self, keeps_requests: bool = False) -> bytes:
        """Return the drafting statistics since the last call (`HistoryProposer.drain`), a pickled `DraftStats`."""
        proposer = self._proposer()
        return pickle.dumps(DraftStats() if proposer is None else proposer.drain(keeps_requests=keeps_requests))

    def _proposer(self) -> HistoryProposer | None:
        """The proposer; None in a baseline engine, which does not draft."""
        drafter = getattr(self.model_runner, "drafter", None)
        return drafter if isinstance(drafter, HistoryProposer) else None

    # -- weights -----------------------------------------------------------------------------------

    def answer(self, method: str, *args: object) -> list[object]:
        """Run a method; returns [result, ""] or, after an exception, [None, type and message].

        An exception must not leave a rank. vLLM would raise it right after the first rank's answer, and would then
        mistake the other ranks' answers for answers to its next call.
        """
        try:
            return [getattr(self, method)(*args), ""]
        except Exception as error:  # process border
            logging.getLogger(__name__).exception("rank %s could not %s", self.rank, method)
            return [None, f"{type(error).__name__}: {error}"]

    def open_channel(self, channel: bytes) -> None:
        """Join the channel (a pickled `Channel`) through which publishes arrive."""
        self.init_weight_transfer_engine({"channel": channel})

    def close_channel(self) -> None:
        """Leave the channel."""
        self._receiver().shutdown()  # vLLM has a method for it since 0.32

    def required(self, specs: bytes) -> bytes:
        """Pickled `Required`: the boxes this rank requires of these tensors (a pickled tuple of `TensorSpec`)."""
        return pickle.dumps(self._receiver().required(pickle.loads(specs)))

    def built_model(self) -> bytes:
        """Pickled `rollout.built_model.BuiltModel` of this rank."""
        return pickle.dumps(model_report.built_model(self.model_runner.get_model(), self.vllm_config))

    def count(self, counted: bytes) -> None:
        """Choose what this rank sums; a pickled list, for each rank the tensors and boxes of its fingerprint."""
        self._receiver().count(pickle.loads(counted)[self.rank])

    def loaded_fingerprint(self) -> bytes:
        """Pickled `rollout.weights.fingerprint_sums.Fingerprint` of the weights that the model holds now."""
        with set_current_vllm_config(self.vllm_config):
            return pickle.dumps(self._receiver().loaded_fingerprint())

    def hold_manifest(self, manifest: bytes) -> None:
        """Keep a manifest for the publishes of its plan; a pickled `Announcement` and `WeightManifest`."""
        self._receiver().hold(*pickle.loads(manifest))

    def expect_weights(self, order: bytes) -> None:
        """Announce a publish (a pickled `UpdateOrder`) without touching the model."""
        self._receiver().expect(pickle.loads(order))

    def weights_arrived(self) -> bool:
        """Whether verified buckets of the announced publish are there, so that it can be applied."""
        return self._receiver().arrived()

    def apply_weights(self, weight_version: int) -> bytes:
        """Apply the announced publish; returns a pickled `rollout.worker.receiver.Loaded`.

        After a failure the model has mixed weights; a next publish is possible.
        """
        self.start_weight_update()
        self._is_first_of_version = True
        try:
            with set_current_vllm_config(self.vllm_config):
                self.update_weights({"weight_version": weight_version})
            self.finish_weight_update()
            with set_current_vllm_config(self.vllm_config):
                return pickle.dumps(self._receiver().loaded())
        except Exception:  # after any failure no layer may stay half loaded; `answer` reports the error
            with set_current_vllm_config(self.vllm_config):
                self._receiver().discard()
            self._weight_update_active = False
            raise

    def forget_shared_memory(self) -> None:
        """See `quirks.segments_of_tensor_parallel_ranks_outlive_their_engine`."""
        quirks.segments_of_tensor_parallel_ranks_outlive_their_engine()

    def _receiver(self) -> BucketReceiver:
        receiver = self.weight_transfer_engine
        assert isinstance(receiver, BucketReceiver)
        return receiver

    # -- proof -------------------------------------------------------------------------------------

    def probe(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities of a prompt's tokens given those before them, at temperature 1, [len - 1].

        Runs one forward outside the scheduler, which must be paused. The forward writes to blocks of the key-value
        cache that may belong to a response, so their contents are saved and restored.
        """
        with self._probing(token_ids) as order:
            return self._run_probe(order)

    def set_kv_scales(self, token_ids: list[int]) -> None:
        """Set the scales of keys and values in FP8 by a forward of a prompt; nothing may be cached."""
        layers = kv_scales.attention_layers(self.vllm_config)
        with self._probing(token_ids) as order, kv_scales.setting_scales(layers):
            self._run_probe(order)

    def kv_scales(self) -> list[list[object]]:
        """[layer, key scale, value scale] of each layer with keys and values in FP8."""
        return kv_scales.scales(kv_scales.attention_layers(self.vllm_config))

    @contextmanager
    def _probing(self, token_ids: list[int]) -> Iterator[SchedulerOutput]:
        """Order of one forward of a prompt; the cache blocks that the forward writes are restored afterwards."""
        limit = self.scheduler_config.max_num_batched_tokens
        if len(token_ids) > limit:
            raise ValueError(f"a probe of {len(token_ids)} tokens is longer than one forward ({limit} tokens)")
        order = _probe_order(token_ids, self._block_sizes())
        saved = [(blocks, blocks.clone()) for blocks in self._probed_blocks(order)]
        try:
            yield order
        finally:
            for blocks, content in saved:
                blocks.copy_(content)

    def _probed_blocks(self, order: SchedulerOutput) -> list[torch.Tensor]:
        """Views of the cache blocks that a probe writes, one per layer."""
        (new,) = order.scheduled_new_reqs
        count = 1 + max(block for blocks in new.block_ids for block in blocks)
        num_blocks = self.model_runner.kv_cache_config.num_blocks
        return [vllm_compat.first_blocks(cache, num_blocks, count) for cache in self.model_runner.kv_caches]

    def _run_probe(self, order: SchedulerOutput) -> list[float]:
        output = super().execute_model(order)
        if output is None:
            output = super().sample_tokens(None)
        if hasattr(output, "get_output"):
            output = output.get_output()
        finished = SchedulerOutput.make_empty()
        finished.finished_req_ids = {PROBE_ID}
        super().execute_model(finished)
        if self.rank != 0:
            return []
        logprobs = output.prompt_logprobs_dict[PROBE_ID].logprobs
        return [float(value) for value in logprobs[:, 0]]

    def _block_sizes(self) -> list[int]:
        return [group.kv_cache_spec.block_size for group in self.model_runner.kv_cache_config.kv_cache_groups]

    def kernel_classes(self) -> list[list[str]]:
        """Name and kernel of each linear layer; the kernel shows whether a layer multiplies in 8 bits."""
        return [
            [name, kernel]
            for name, layer in self.model_runner.get_model().named_modules()
            if (kernel := _kernel_of(layer)) is not None
        ]

    def kernel_notes(self) -> list[str]:
        """Lines for the log of a run: how INT8 codes are multiplied, if any layer has them."""
        layers = self.model_runner.get_model().modules()
        if any(isinstance(_chosen_kernel(layer), Int8ScaledMMLinearKernel) for layer in layers):
            return [exact_int8.check_vllm_kernel().line()]
        return []


def _describe(
    order: SchedulerOutput, started_at_s: float, seconds: Callable[[], float], *, num_preempted: int
) -> ForwardRecord:
    context = sum(order.scheduled_cached_reqs.num_computed_tokens)
    context += sum(new.num_computed_tokens for new in order.scheduled_new_reqs)
    return ForwardRecord(
        started_at_s=started_at_s,
        num_running=len(order.num_scheduled_tokens),
        num_preempted=num_preempted,
        num_scheduled_tokens=order.total_num_scheduled_tokens,
        num_context_tokens=context,
        seconds=seconds,
    )


def _only_decodes(order: SchedulerOutput) -> bool:
    """Whether every row computes its newest token and its draft, and no row is in prefill."""
    num_drafted = sum(len(draft) for draft in order.scheduled_spec_decode_tokens.values())
    return bool(order.total_num_scheduled_tokens == len(order.num_scheduled_tokens) + num_drafted)


def _probe_order(token_ids: list[int], block_sizes: list[int]) -> SchedulerOutput:
    # block 0 is vLLM's null block and never holds anything
    blocks = tuple(list(range(1, 1 + math.ceil((len(token_ids) + 1) / size))) for size in block_sizes)
    request = NewRequestData(
        req_id=PROBE_ID,
        prompt_token_ids=list(token_ids),
        mm_features=[],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False),
        pooling_params=None,
        block_ids=blocks,
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=list(token_ids),
    )
    order = SchedulerOutput.make_empty()
    order.scheduled_new_reqs = [request]
    order.num_scheduled_tokens = {PROBE_ID: len(token_ids)}
    order.total_num_scheduled_tokens = len(token_ids)
    return order


def _kernel_of(layer: torch.nn.Module) -> str | None:
    method = getattr(layer, "quant_method", None)
    if method is None or not hasattr(layer, "input_size"):
        return None
    kernel = _chosen_kernel(layer)
    if kernel is None:
        return type(method).__name__
    chosen = getattr(kernel, "linear_method", None)
    return type(kernel).__name__ + (f".{chosen.__name__}" if chosen is not None else "")


def _chosen_kernel(layer: torch.nn.Module) -> object | None:
    """The kernel of a layer whose weights are quantised; None if there is none."""
    scheme = getattr(layer, "scheme", getattr(layer, "quant_method", None))
    return getattr(scheme, "kernel", getattr(scheme, "fp8_linear", None))
