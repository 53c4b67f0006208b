"""One trainer in several partitions: same learning, same published weights, same state after a reload."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.batching.balance import PackingRules
from megatron_rl.batching.batch import build_batch
from megatron_rl.batching.cost_model import CostModel
from megatron_rl.batching.sft_batch import SftBatch, sft_batches
from megatron_rl.config import (
    AlgorithmConfig,
    CorrectionConfig,
    OptimizerConfig,
    ParallelConfig,
    PublishConfig,
    RejectionConfig,
    TrainerConfig,
)
from megatron_rl.trainer.messages import TrainerSpec
from rollout.data.sft_rows import SftRows
from rollout.types import ColumnsRef, WeightVersion
from rollout.weights.fingerprint_sums import add_up, difference
from rollout.weights.format import WeightFormat
from rollout.weights.manifest import DTYPE_BYTES
from tests.support.engines.weight_faults import meant
from tests.support.scored_groups import scored_group
from tests.support.trainers.memory_sender import MemorySender
from tests.support.trainers.saves import save
from tests.support.trainers.tiny_megatron_models import reference_logits, save_model

TP2, PP2, DP2 = ParallelConfig(tensor=2), ParallelConfig(pipeline=2), ParallelConfig(data=2)
COSTS = CostModel(parity_tokens=1000)
LAYOUTS = [TP2, PP2, DP2, ParallelConfig(tensor=2, pipeline=2)]
SPREAD = [TP2, ParallelConfig(data=2, expert=2), ParallelConfig(pipeline=2, data=2, expert=2)]
"""Experts over tensor-parallel ranks, and over data-parallel ones; gloo cannot do both."""


def trainer_spec(
    directory: Path, parallel: ParallelConfig, algorithm: AlgorithmConfig, *, format: str = "bf16", **optimizer
):
    return TrainerSpec(
        model=str(directory),
        run_id="test",
        config=TrainerConfig(
            parallel=parallel,
            dtype="fp32",
            optimizer=OptimizerConfig(learning_rate=1e-2, **optimizer),
            logprob_chunk_tokens=7,
        ),
        algorithm=algorithm,
        publish=PublishConfig(bucket_bytes=20_000, probe_tokens=12),
        format=WeightFormat(name=format),
        temperature=0.9,
        max_response_tokens=16,
        total_updates=10,
        seed=0,
    )


def batch_for(parallel: ParallelConfig, algorithm: AlgorithmConfig, *, groups: int = 4, max_tokens: int = 40):
    scored = [scored_group(number) for number in range(groups)]
    return build_batch(
        scored,
        0,
        algorithm=algorithm,
        rules=PackingRules(
            num_ranks=parallel.data,
            max_tokens=max_tokens,
            costs=CostModel(parity_tokens=1000, pipeline=parallel.pipeline),
        ),
        seed=3,
    )


def train_and_publish(position, parallel, spec, batches):
    """Train on every batch, then return metrics, the filled buckets, the probe and the plan."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    trainer.plan_publishes(())
    results = [trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs) for batch in batches]
    sender = MemorySender()
    trainer.stage(WeightVersion(1), sender)
    probe = trainer.probe(list(range(1, 13)))
    return results, sender.contents, probe, trainer.publishes.plan


def assembled(outcomes) -> dict[str, np.ndarray]:
    """Whole tensors from the buckets of all ranks, as raw integers or floats."""
    plan = outcomes[0][3]
    plan.manifest("test", WeightVersion(1)).check()
    numpy_of = {"bfloat16": np.int16, "int8": np.int8, "float32": np.float32, "float8_e4m3fn": np.uint8}
    whole = {spec.name: np.zeros(spec.shape, numpy_of[spec.dtype]) for spec in plan.tensors}
    for rank, outcome in enumerate(outcomes):
        for bucket in plan.buckets_of(rank):
            data = outcome[1][bucket.index]
            for piece in bucket.pieces:
                spec = plan.tensors[piece.tensor]
                size = int(np.prod(piece.shape)) * DTYPE_BYTES[spec.dtype]
                box = np.frombuffer(data[piece.offset : piece.offset + size], numpy_of[spec.dtype]).reshape(piece.shape)
                whole[spec.name][tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))] = box
    return whole


def unmeasured(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics without measured times."""
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


ALGORITHMS = {
    "one update": AlgorithmConfig(group_size=4, prompts_per_step=4),
    "two mini batches, two epochs, normalised sequence TIS": AlgorithmConfig(
        group_size=4,
        prompts_per_step=4,
        num_mini_batches=2,
        num_epochs=2,
        aggregation="sequence_mean",
        entropy={"coefficient": 0.01},
        correction=CorrectionConfig(mode="tis_sequence", batch_normalize=True),
    ),
    "advantages of tokens": AlgorithmConfig(
        advantage={"name": "discounted_returns", "gamma": 0.9}, group_size=4, prompts_per_step=4
    ),
}


@pytest.mark.parametrize(
    ("family", "name", "layouts"),
    [*(("qwen3", name, LAYOUTS) for name in ALGORITHMS), ("qwen3_moe", "one update", SPREAD)],
)
def test_every_partition_learns_the_same_as_a_single_process(ranks, tmp_path, family, name, layouts):
    algorithm = ALGORITHMS[name]
    save_model(family, tmp_path)
    single = ParallelConfig()
    (reference,) = ranks.run(
        train_and_publish,
        trainer_spec(tmp_path, single, algorithm),
        [batch_for(single, algorithm)] * 2,
        parallel=single,
    )
    wanted, metrics = assembled([reference]), unmeasured(reference[0][-1].metrics)
    for parallel in layouts:
        spec = trainer_spec(tmp_path, parallel, algorithm)
        outcomes = ranks.run(train_and_publish, spec, [batch_for(parallel, algorithm)] * 2, parallel=parallel)
        found = unmeasured(outcomes[-1][0][-1].metrics)
        assert found.keys() == metrics.keys()
        for key, value in metrics.items():
            assert found[key] == pytest.approx(value, rel=2e-3, abs=2e-5), (parallel, key)
        for key, tensor in assembled(outcomes).items():
            a, b = (torch.from_numpy(t).view(torch.bfloat16).float() for t in (tensor, wanted[key]))
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3, msg=f"{parallel} {key}")


def naive_codes(weight: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales by the rule of each format."""
    if format == "fp8_block":
        return in_blocks(weight)
    largest = np.abs(weight).max(axis=1, keepdims=True)
    if format == "int8":
        scale = largest / np.float32(127)
        return np.clip(np.rint(weight / scale), -127, 127), scale
    multiplier = np.float32(448) / largest
    codes = torch.from_numpy(np.clip(weight * multiplier, -448, 448)).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).numpy(), 1 / multiplier


def in_blocks(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Block by block: the largest power of two that keeps all weights within 448."""
    rows, columns = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
    codes, inverse = np.zeros(weight.shape, np.uint8), np.zeros((rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            box = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            exponent = math.floor(math.log2(448 / np.abs(weight[box]).max()))
            scaled = torch.from_numpy(weight[box] * np.float32(2.0**exponent))
            codes[box] = scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            inverse[i, j] = 2.0**-exponent
    return codes, inverse


CODES = [("qwen2_tied", "int8"), ("qwen3", "int8"), ("llama", "int8"), ("qwen2_tied", "fp8_channel")]
CODES += [("qwen3", "fp8_block"), ("wide", "fp8_block")]


@pytest.mark.parametrize(("family", "format"), CODES)
def test_published_codes_equal_a_naive_quantiser_of_the_directory_under_every_partition(
    ranks, tmp_path, family, format
):
    algorithm = ALGORITHMS["one update"]
    tensors = load_file(save_model(family, tmp_path) / "model.safetensors")
    shared_heads = [ParallelConfig(tensor=4)] if family == "qwen3" else []
    for parallel in [ParallelConfig(), TP2, ParallelConfig(tensor=2, pipeline=2), *shared_heads]:
        spec = trainer_spec(tmp_path, parallel, algorithm, format=format)
        found = assembled(ranks.run(train_and_publish, spec, [], parallel=parallel))
        for name, tensor in tensors.items():
            if ".layers." in name and tensor.ndim == 2:
                codes, scales = naive_codes(tensor.float().numpy(), format)
                suffix = "_scale_inv" if format == "fp8_block" else "_scale"
                np.testing.assert_array_equal(found.pop(name + suffix), scales)
                np.testing.assert_array_equal(found.pop(name), codes)
            else:
                assert np.array_equal(found.pop(name), tensor.bfloat16().view(torch.int16).numpy()), name
        assert not found


@pytest.mark.parametrize("format", ["int8", "fp8_channel", "fp8_block", "bf16"])
def test_sums_taken_while_packing_are_those_of_the_sent_tensors_in_any_partition(ranks, tmp_path, format):
    algorithm = ALGORITHMS["one update"]
    save_model("qwen3", tmp_path)
    probes = {}
    for parallel in [ParallelConfig(), ParallelConfig(tensor=2, pipeline=2)]:
        spec = trainer_spec(tmp_path, parallel, algorithm, format=format)
        outcomes = ranks.run(stage_and_prove, spec, parallel=parallel)
        sent = {name: torch.from_numpy(tensor) for name, tensor in assembled(outcomes).items()}
        dtypes = {one.name: getattr(torch, one.dtype) for one in outcomes[0][3].tensors}
        sent = {name: tensor.view(dtypes[name]) for name, tensor in sent.items()}
        sums = add_up(outcome[0].sums for outcome in outcomes)
        gap, where = difference(sums, meant(sent))
        assert gap < 1e-5, where
        probes[parallel] = outcomes[-1][0].probe.logprobs
    first, second = probes.values()
    np.testing.assert_allclose(first, second, atol=1e-4)


def stage_and_prove(position, parallel, spec):
    """The trainer's proof, the filled buckets, nothing, and the plan, in the order that `assembled` expects."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    trainer.plan_publishes(())
    before = {name: p.clone() for name, p in trainer._model.named_parameters()}
    sender = MemorySender()
    trainer.stage(WeightVersion(0), sender, with_sums=False)
    with pytest.raises(RuntimeError, match="has no sums"):
        trainer.proof(list(range(1, 13)))
    trainer.stage(WeightVersion(1), sender)
    proof = trainer.proof(list(range(1, 13)))
    for name, p in trainer._model.named_parameters():
        assert torch.equal(p, before[name]), name
    return proof, sender.contents, None, trainer.publishes.plan


def test_the_distributed_optimizer_learns_the_same(ranks, tmp_path):
    algorithm = ALGORITHMS["one update"]
    save_model("qwen3", tmp_path)
    batches = [batch_for(DP2, algorithm)] * 2
    plain, sharded = (
        assembled(
            ranks.run(train_and_publish, trainer_spec(tmp_path, DP2, algorithm, distributed=on), batches, parallel=DP2)
        )
        for on in (False, True)
    )
    for name, tensor in plain.items():
        a, b = (torch.from_numpy(t).view(torch.bfloat16).float() for t in (tensor, sharded[name]))
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3, msg=name)


def test_a_gradient_that_is_not_finite_skips_the_update_and_is_counted(ranks, tmp_path):
    algorithm = ALGORITHMS["one update"]
    save_model("qwen3", tmp_path)
    spec = trainer_spec(tmp_path, TP2, algorithm)
    for before, after, results in ranks.run(train_on_a_poisoned_batch, spec, batch_for(TP2, algorithm), parallel=TP2):
        assert [(r.num_optimizer_steps, r.num_skipped_updates) for r in results] == [(0, 1), (1, 0)]
        assert all(torch.equal(before[name], after[name]) for name in before)


def train_on_a_poisoned_batch(position, parallel, spec, batch):
    """Train with an infinite advantage, then as usual; returns parameters around the first step, and both results."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    parameters = dict(trainer._model.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    poisoned = replace_samples(batch, lambda sample: replace(sample, advantage=float("inf")))
    first = trainer.train(poisoned.of_rank(trainer.data_rank), lambda refs: refs)
    after = {name: p.detach().clone() for name, p in parameters.items()}
    return before, after, (first, trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs))


def replace_samples(batch, new):
    """The batch with `new(sample)` for every sample; None leaves a sample out."""

    def micro(m):
        return replace(m, samples=tuple(kept for sample in m.samples if (kept := new(sample)) is not None))

    def mini(m):
        kept = tuple(tuple(map(micro, rank)) for rank in m.micro_batches)
        samples = [sample for rank in kept for each in rank for sample in each.samples]
        num_tokens = sum(sample.num_response_tokens for sample in samples)
        return replace(m, micro_batches=kept, num_response_tokens=num_tokens, num_sequences=len(samples))

    return replace(batch, mini_batches=tuple(map(mini, batch.mini_batches)))


REJECTED = 2
"""Sample of every group whose response is rejected."""


@pytest.mark.parametrize("parallel", [ParallelConfig(), DP2, PP2], ids=["single", "data", "pipeline"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_rejected_responses_change_nothing_but_that_they_are_missing(ranks, tmp_path, parallel, aggregation):
    save_model("qwen3", tmp_path)
    rule = RejectionConfig(statistic="seq_mean_k2", high=50.0)
    algorithm = AlgorithmConfig(
        **{"group_size": 4, "prompts_per_step": 4, "num_mini_batches": 2, "aggregation": aggregation},
        correction=CorrectionConfig(mode="none", rejections=(rule,)),
    )
    batch = batch_for(parallel, algorithm)

    def off_policy(sample):
        logprobs = sample.columns.rollout_logprobs.copy()
        logprobs[slice(*sample.columns.offsets[REJECTED : REJECTED + 2])] = -30.0
        return replace(sample, columns=ColumnsRef(replace(sample.columns, rollout_logprobs=logprobs)))

    rejecting = replace_samples(batch, off_policy)
    without = replace_samples(batch, lambda sample: None if sample.sample == REJECTED else sample)
    spec = trainer_spec(tmp_path, parallel, algorithm)
    outcomes = [ranks.run(train_and_publish, spec, [each] * 2, parallel=parallel) for each in (rejecting, without)]
    for step in range(2):
        # Adam does not see a constant factor of all gradients; their norm does
        (norm, loss), expected = (
            [outcome[-1][0][step].metrics[key] for key in ("actor/grad_norm", "actor/pg_loss")] for outcome in outcomes
        )
        assert [norm, loss] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    found, wanted = map(assembled, outcomes)
    for name, tensor in wanted.items():
        a, b = (torch.from_numpy(t).view(torch.bfloat16).float() for t in (tensor, found[name]))
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.parametrize("further", [{}, {"kl": {"place": "loss"}}, {"advantage": {"name": "gae"}}], ids=str)
def test_the_schedule_advances_by_the_configured_updates_whatever_was_dropped(ranks, tmp_path, further):
    """Also with a reference or a critic, which then have nothing to score."""
    sizes = {"group_size": 4, "prompts_per_step": 4, "num_mini_batches": 4}
    algorithm = AlgorithmConfig.model_validate({**sizes, **further})
    save_model("qwen3", tmp_path)
    whole = batch_for(ParallelConfig(), algorithm)
    batches = [whole, replace(whole, mini_batches=whole.mini_batches[:1]), replace(whole, mini_batches=()), whole]
    batches = [replace(batch, policy_version=step) for step, batch in enumerate(batches)]
    spec = trainer_spec(tmp_path, ParallelConfig(), algorithm, decay="linear")
    spec = replace(spec, total_updates=16)
    (found,) = ranks.run(rates_and_positions, spec, batches, parallel=ParallelConfig())
    rates, positions = zip(*found, strict=True)
    assert positions == (4, 8, 12, 16)
    # of the last update: the second batch has made the fifth one only, and the third batch none
    assert [rates[0], rates[1], rates[3]] == pytest.approx([1e-2 * (1 - update / 17) for update in (4, 5, 16)])


def rates_and_positions(position, parallel, spec, batches):
    """The learning rate that each batch reports, and where its schedule stands afterwards, in updates."""
    from megatron_rl.trainer.trainer import Trainer

    trainer, found = Trainer(spec, position), []
    for batch in batches:
        result = trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
        found.append((result.metrics["actor/lr"], trainer._policy.schedule.num_steps))
    return found


@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("qwen3_tied", TP2),
        ("qwen3_tied", PP2),
        ("qwen3_tied", ParallelConfig()),
        ("qwen3_moe", ParallelConfig()),
    ],
    ids=["same", "pipeline", "single", "single, experts"],
)
def test_training_resumed_under_another_partition_is_unchanged(ranks, tmp_path, family, target):
    algorithm = ALGORITHMS["one update"]
    model, saved = tmp_path / "model", tmp_path / "saved"
    save_model(family, model)
    whole = ranks.run(
        train_save_train, trainer_spec(model, TP2, algorithm), batch_for(TP2, algorithm), saved, parallel=TP2
    )
    spec = trainer_spec(model, target, algorithm)
    resumed = ranks.run(load_and_train, spec, batch_for(target, algorithm), saved, parallel=target)
    wanted, found = assembled(whole), assembled(resumed)
    assert resumed[-1][0][0].metrics["actor/lr"] == whole[-1][0][0].metrics["actor/lr"]
    for name, tensor in wanted.items():
        if target == TP2:
            assert np.array_equal(tensor, found[name]), name
        a, b = (torch.from_numpy(t).view(torch.bfloat16).float() for t in (tensor, found[name]))
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3, msg=name)


def test_training_resumed_with_the_distributed_optimizer_is_bitwise_equal(ranks, tmp_path):
    algorithm = ALGORITHMS["one update"]
    model, saved = tmp_path / "model", tmp_path / "saved"
    save_model("qwen3_tied", model)
    spec, batch = trainer_spec(model, DP2, algorithm, distributed=True), batch_for(DP2, algorithm)
    whole = ranks.run(train_save_train, spec, batch, saved, parallel=DP2)
    resumed = ranks.run(load_and_train, spec, batch, saved, parallel=DP2)
    found = assembled(resumed)
    assert all(np.array_equal(tensor, found[name]) for name, tensor in assembled(whole).items())


def test_a_checkpoint_of_expert_parallel_ranks_resumes_only_with_the_same_expert_partition(ranks, tmp_path):
    algorithm, spread = ALGORITHMS["one update"], ParallelConfig(data=2, expert=2)
    model, saved = tmp_path / "model", tmp_path / "saved"
    save_model("qwen3_moe", model)
    spec = trainer_spec(model, spread, algorithm)
    whole = ranks.run(train_save_train, spec, batch_for(spread, algorithm), saved, parallel=spread)
    resumed = ranks.run(load_and_train, spec, batch_for(spread, algorithm), saved, parallel=spread)
    wanted, found = assembled(whole), assembled(resumed)
    assert all(np.array_equal(tensor, found[name]) for name, tensor in wanted.items())
    spec = trainer_spec(model, DP2, algorithm)
    with pytest.raises(RuntimeError, match=r"parallel\.expert above 1, but it is 1 now; set it above 1"):
        ranks.run(load_and_train, spec, batch_for(DP2, algorithm), saved, parallel=DP2)


def resume_with_another_optimizer(position, parallel, spec, batch, path):
    """The rate of a step from a checkpoint, and what the groups of parameters say, for policy and optimizer."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    trainer.load(str(path))
    groups = trainer._policy.optimizer.param_groups
    said = [(group["max_lr"], group["min_lr"], group["betas"], group["eps"]) for group in groups]
    return trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs).metrics["actor/lr"], said


@pytest.mark.parametrize("distributed", [False, True])
def test_a_resumed_optimizer_follows_the_configuration_and_not_the_checkpoint(ranks, tmp_path, distributed):
    algorithm = ALGORITHMS["one update"]
    model, saved = tmp_path / "model", tmp_path / "saved"
    save_model("qwen3", model)
    batch = batch_for(DP2, algorithm)
    spec = trainer_spec(model, DP2, algorithm, distributed=distributed)
    ranks.run(train_save_train, spec, batch, saved, parallel=DP2)
    changed = OptimizerConfig(
        learning_rate=1e-4, min_learning_rate=1e-5, beta1=0.8, beta2=0.9, eps=1e-6, distributed=distributed
    )
    spec = replace(spec, config=spec.config.model_copy(update={"optimizer": changed}))
    for rate, groups in ranks.run(resume_with_another_optimizer, spec, batch, saved, parallel=DP2):
        assert rate == pytest.approx(1e-4)
        assert set(groups) == {(1e-4, 1e-5, (0.8, 0.9), 1e-6)}


def train_save_train(position, parallel, spec, batch, path):
    """Two steps with a checkpoint between them; returns the same as `train_and_publish`."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
    save(trainer, str(path))
    return finish_with(trainer, batch)


def load_and_train(position, parallel, spec, batch, path):
    """A step from a checkpoint."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    trainer.load(str(path))
    return finish_with(trainer, batch)


def finish_with(trainer, batch):
    results = [trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)]
    trainer.plan_publishes(())
    sender = MemorySender()
    trainer.stage(WeightVersion(1), sender)
    return results, sender.contents, None, trainer.publishes.plan


def test_supervised_steps_learn_the_same_under_every_partition_with_the_mean_negative_logprob_as_loss(ranks, tmp_path):
    algorithm = ALGORITHMS["one update"]
    directory = save_model("qwen3", tmp_path)
    generator = np.random.default_rng(0)
    rows = SftRows(
        prompts=tuple(generator.integers(1, 60, n).astype(np.int32) for n in (3, 5, 4, 6, 2)),
        responses=tuple(generator.integers(1, 60, n).astype(np.int32) for n in (7, 2, 5, 3, 9)),
    )
    reference = -np.concatenate(list(teacher_forced(directory, rows))).mean()
    losses = {}
    for parallel in [ParallelConfig(), TP2, PP2, DP2]:
        batches = list(
            sft_batches(
                rows.lengths(),
                [len(r) for r in rows.responses],
                batch_size=5,
                num_steps=3,
                rules=PackingRules(num_ranks=parallel.data, max_tokens=18, costs=COSTS),
                seed=0,
            )
        )
        spec = trainer_spec(directory, parallel, algorithm)
        results = ranks.run(sft_steps, spec, batches, rows, parallel=parallel)[-1]
        losses[parallel] = [result.metrics["sft/loss"] for result in results]
    for found in losses.values():
        assert found[0] == pytest.approx(reference, abs=1e-4)
        assert found == pytest.approx(losses[ParallelConfig()], abs=2e-3)
        assert found[2] < found[0]


def sft_steps(position, parallel, spec, batches, rows):
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    results = [trainer.sft_step(batch, rows) for batch in batches]
    with pytest.raises(RuntimeError, match="has no plan of publishes"):
        trainer.stage(WeightVersion(0), MemorySender())
    return results


def test_a_skipped_update_of_sft_does_not_stretch_the_schedule(ranks, tmp_path):
    directory = save_model("qwen3", tmp_path)
    ids = np.arange(1, 6, dtype=np.int32)
    rows = SftRows(prompts=(ids,), responses=(ids,))
    batch = SftBatch(micro_batches=(((0,),),), num_tokens=5)
    spec = trainer_spec(directory, ParallelConfig(), ALGORITHMS["one update"])
    ((results, positions),) = ranks.run(sft_with_a_poisoned_step, spec, batch, rows, parallel=ParallelConfig())
    assert [(r.num_optimizer_steps, r.num_skipped_updates) for r in results] == [(0, 1), (1, 0)]
    assert positions == [1, 2]


def sft_with_a_poisoned_step(position, parallel, spec, batch, rows):
    """Train with an infinite weight, then as usual; returns the results, and the schedule's position after each."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    weight = next(trainer._model.parameters())
    kept = weight.detach().clone()
    results, positions = [], []
    for value in (torch.full_like(kept, torch.inf), kept):
        weight.data.copy_(value)
        results.append(trainer.sft_step(batch, rows))
        positions.append(trainer._policy.schedule.num_steps)
    return results, positions


def teacher_forced(directory, rows):
    """Log-probabilities of the responses, computed by transformers."""
    sequences = [np.concatenate(pair) for pair in zip(rows.prompts, rows.responses, strict=True)]
    logits = reference_logits(directory, sequences).split([len(ids) for ids in sequences])
    for prompt, ids, of_row in zip(rows.prompts, sequences, logits, strict=True):
        logprobs = of_row.log_softmax(-1)[:-1].gather(1, torch.as_tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0]
        yield logprobs[len(prompt) - 1 :].numpy()


def train_with_moves(position, parallel, spec, batches, moves):
    """Train on every batch and offload these parts in between; returns the final weights and the freed bytes."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    freed = []
    for batch in batches:
        trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
        if moves:
            freed.append(trainer.offload(moves))
            emptied = [p.untyped_storage().nbytes() for p in trainer._model.parameters()]
            assert all(size == 0 for size in emptied) == ("weights" in moves)
            trainer.offload(moves)  # is out already
            trainer.onload()
    return {name: p.detach().numpy().copy() for name, p in trainer._model.named_parameters()}, freed


@pytest.mark.parametrize("distributed", [False, True])
def test_training_after_offloading_to_host_memory_is_bitwise_equal(ranks, tmp_path, distributed):
    save_model("qwen3", tmp_path)
    parallel, algorithm = DP2, ALGORITHMS["one update"]
    spec = trainer_spec(tmp_path, parallel, algorithm, distributed=distributed)
    batches = [batch_for(parallel, algorithm)] * 2
    expected = ranks.run(train_with_moves, spec, batches, (), parallel=parallel)
    for moves in (("gradients", "optimizer"), ("weights", "gradients", "optimizer")):
        found = ranks.run(train_with_moves, spec, batches, moves, parallel=parallel)
        for (weights, freed), (right, _) in zip(found, expected, strict=True):
            assert all(np.array_equal(weights[name], right[name]) for name in right)
            held = sum(4 * value.size for value in right.values())
            # masters are the weights themselves in an FP32 run; a distributed optimizer has its share of the moments
            moments = 2 * held // (2 if distributed else 1)
            least = held + moments + (held if "weights" in moves else 0)
            assert all(least <= one <= least + 4096 for one in freed)


def test_the_parts_of_the_mismatch_are_those_of_a_model_that_holds_the_published_values(ranks, tmp_path):
    algorithm = AlgorithmConfig(group_size=4, prompts_per_step=4, mismatch_sample_tokens=10_000)
    save_model("qwen3", tmp_path)
    found = []
    four = ParallelConfig(pipeline=2, data=2)
    for parallel, max_tokens in [(ParallelConfig(), 10_000), (four, 10_000), (four, 20)]:  # the last: five and six
        spec = trainer_spec(tmp_path, parallel, algorithm, format="int8")
        spec = replace(spec, config=spec.config.model_copy(update={"max_micro_batch_tokens": max_tokens}))
        found.append(ranks.run(parts_twice, spec, batch_for(parallel, algorithm), parallel=parallel)[-1])
    single, *spread = found
    measured, expected, without_publish = single
    assert without_publish == {}
    assert measured["rollout_corr/part_tokens"] == expected["tokens"]
    for name in ("quantisation", "numerics", "speculation", "interaction"):
        assert measured[f"rollout_corr/part_k3/{name}"] == pytest.approx(expected[name], rel=1e-3, abs=1e-7), name
    assert expected["quantisation"] > 1e-6
    for name, value in measured.items():
        for one, _, _ in spread:
            assert one[name] == pytest.approx(value, rel=1e-3, abs=1e-7), name


def test_ranks_that_share_experts_forward_equally_many_micro_batches_of_the_sample(ranks, tmp_path):
    """They exchange tokens in every layer, so a rank with one forward more would wait for the others forever."""
    algorithm = AlgorithmConfig(group_size=4, prompts_per_step=4, mismatch_sample_tokens=10_000)
    save_model("qwen3_moe", tmp_path)
    found = []
    for parallel, max_tokens in [(DP2, 10_000), (ParallelConfig(data=2, expert=2), 24)]:  # the second: four and five
        spec = trainer_spec(tmp_path, parallel, algorithm, format="int8")
        spec = replace(spec, config=spec.config.model_copy(update={"max_micro_batch_tokens": max_tokens}))
        found.append(ranks.run(parts_twice, spec, batch_for(parallel, algorithm), parallel=parallel)[-1][0])
    whole, spread = found
    assert whole["rollout_corr/part_tokens"] > 0
    assert spread == pytest.approx(whole, rel=1e-3, abs=1e-7)


def parts_twice(position, parallel, spec, batch):
    """Parts as the trainer reports them, as computed from a model that holds the published values, and without a
    publish of this version.
    """
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    trainer.plan_publishes(())
    part = batch.of_rank(trainer.data_rank)
    without_publish = trainer._mismatch_parts(part, lambda refs: refs)
    trainer.stage(WeightVersion(0), MemorySender())
    results = trainer.train(part, lambda refs: refs).metrics
    measured = {
        name: value for name, value in results.items() if name.startswith(("rollout_corr/part_", "timing_s/mismatch"))
    }
    if not measured:
        return measured, {}, without_publish
    assert measured.pop("timing_s/mismatch_sample") > 0
    expected = {} if parallel.world_size > 1 else parts_of_two_models(spec, position, part)
    return measured, expected, without_publish


def parts_of_two_models(spec, position, part):
    """k3 by cause from two fresh trainers: one with the directory's weights, one with their published values."""
    from megatron_rl.trainer.loaded_batch import load_mini_batch
    from megatron_rl.trainer.trainer import Trainer

    trainers = [Trainer(spec, position) for _ in range(2)]
    trainers[1].plan_publishes(())
    trainers[1].stage(WeightVersion(0), MemorySender())
    packer = trainers[1].publishes.packer
    for name, value in {name: packer.published_values(name) for name, _ in named(trainers[1])}.items():
        dict(named(trainers[1]))[name].data.copy_(value)
    old, codes, rollout, resampled = [], [], [], []
    for mini in part.mini_batches:
        loaded = load_mini_batch(mini, lambda refs: refs, multiple_of=1, device=torch.device("cpu"))
        for scores, trainer in zip((old, codes), trainers, strict=True):
            scores += trainer._learner.logprobs(loaded.micro_batches)
        rollout += [micro.rollout_logprobs for micro in loaded.micro_batches]
        for micro in mini.micro_batches:
            resampled += [torch.tensor(s.columns.resampled_in(s.sample)) for s in micro.samples]
    old, codes, rollout, resampled = (torch.cat(parts) for parts in (old, codes, rollout, resampled))

    def k3(x):
        return (x.double().exp() - 1 - x.double()).numpy()

    rest, drafted = k3(codes - rollout), resampled.numpy()
    product = (old - codes).double().expm1() * (codes - rollout).double().expm1()
    return {
        "tokens": len(rest),
        "quantisation": k3(old - codes).mean(),
        "numerics": rest[~drafted].mean(),
        "speculation": drafted.mean() * (rest[drafted].mean() - rest[~drafted].mean()),
        "interaction": float(product.mean()),
    }


def named(trainer):
    return trainer._model.named_parameters()


def test_a_batch_brings_the_cap_of_its_correction(ranks, tmp_path):
    algorithm = ALGORITHMS["one update"]
    save_model("qwen3", tmp_path)
    batch = batch_for(ParallelConfig(), algorithm)
    batches = [replace(batch, cap=1.01), replace(batch, mini_batches=()), batch]
    spec = trainer_spec(tmp_path, ParallelConfig(), algorithm)
    (largest,) = ranks.run(largest_weights, spec, batches, parallel=ParallelConfig())
    assert largest[0] == pytest.approx(1.01)
    assert 1.01 < largest[2] <= algorithm.correction.cap


def largest_weights(position, parallel, spec, batches):
    """Largest correction weight of each batch; 0 of one without tokens."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    results = [trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs).metrics for batch in batches]
    return [metrics.get("rollout_corr/rollout_is_max", 0.0) for metrics in results]
