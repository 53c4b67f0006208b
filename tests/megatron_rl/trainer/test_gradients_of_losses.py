"""Every loss, under every aggregation it has a meaning with, has the gradient of one process under every partition.

The gradients of one process are those of a plain loop over transformers' model, for a loss with every kind of weight.

Nothing is read from metrics: the gradients that the optimizer would use are compared, tensor by tensor. All columns are
fixed. `old` comes from the same weights times `OLD_SCALE`, `ref` from others, and `rollout` stands in the batch. So
ratios differ from 1, and clips are at work. The learning rate is 0, so one trainer serves all cases.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.algorithm_config import KlEstimator
from megatron_rl.algorithm_settings import AGGREGATIONS, LOSSES
from megatron_rl.batching.batch import TrainBatch
from megatron_rl.batching.selection import TrainingSample
from megatron_rl.config import AlgorithmConfig, ParallelConfig
from rollout.types import ColumnsRef
from tests.megatron_rl.trainer.test_trainer import DP2, PP2, TP2, batch_for, replace_samples, trainer_spec
from tests.support.trainers.tiny_megatron_models import save_model

SINGLE = ParallelConfig()
WHOLE = 400
"""Tokens of a micro batch that holds all samples."""
LAYOUTS = {"data": (DP2, 30), "tensor": (TP2, 50), "pipeline": (PP2, 40)}
"""Partitions, each with another split into micro batches: most tokens of one."""
OLD_SCALE, REF_SCALE = 1.02, 1.02
BOUND, BOUND_OF_A_TENSOR = 1e-5, 1e-4
"""Of the distance to the gradient of one process, relative to its norm, in float32."""

SETTINGS = {"dppo": {"bound_low": 2e-3, "bound_high": 2e-3}, "gspo": {"clip_low": 0.02, "clip_high": 0.02}}
"""Of losses whose defaults clip all tokens of this batch, or none."""

CAP = 0.9
"""Of the importance weights of one case; a good part of them reaches it."""
REJECTED_K3 = 0.01
"""Tokens whose k3 is above it are rejected in one case."""

CORRECTIONS: dict[str, dict[str, object]] = {
    "truncated weights": {"mode": "tis_token", "cap": CAP},
    "normalised sequence weights": {"mode": "tis_sequence", "batch_normalize": True},
    "a band": {"mode": "icepop", "low": 0.9, "cap": 1.1},
    "a mask whose means are over kept tokens": {"mode": "mis_geometric", "low": 0.85, "cap": 1.1},
    "a rejection of tokens": {"rejections": [{"statistic": "token_k3", "high": REJECTED_K3}]},
}


def algorithm(**keys: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"group_size": 4, "prompts_per_step": 4} | keys)


def cases() -> dict[str, AlgorithmConfig]:
    """Every loss with every aggregation that `launcher.checks` lets it have, then terms, then corrections."""
    found = {}
    for loss, settings in LOSSES.by_name.items():
        choice = {"name": loss, **SETTINGS.get(loss, {})}
        correction = {"mode": "none"} if loss == "bypass" else {}
        for aggregation in AGGREGATIONS.by_name:
            if getattr(settings, "aggregation", "") in ("", aggregation):
                found[f"{loss}, {aggregation}"] = algorithm(loss=choice, aggregation=aggregation, correction=correction)
    for estimator, aggregation in zip(get_args(KlEstimator), AGGREGATIONS.by_name, strict=True):
        kl = {"place": "loss", "estimator": estimator, "coefficient": 0.7}
        found[f"{estimator} and entropy, {aggregation}"] = algorithm(
            aggregation=aggregation, kl=kl, entropy={"coefficient": 0.3}
        )
    for name, correction in CORRECTIONS.items():
        found[name] = algorithm(correction=correction)
    return found


def prepared_trainer(position, spec):
    """A trainer whose reference is not the policy, and its one mini batch as a function of a batch."""
    from megatron_rl.model.parallel import device
    from megatron_rl.trainer.loaded_batch import load_mini_batch
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    for weight in trainer._further.reference.weights().values():
        weight.mul_(REF_SCALE)

    def load(batch):
        (mini,) = batch.of_rank(trainer.data_rank).mini_batches
        return load_mini_batch(mini, lambda refs: refs, multiple_of=trainer.row_multiple, device=device())

    return trainer, load


def logprobs_of(position, parallel, spec, batch):
    """Log-probabilities of every response by group and sample, in one process."""
    trainer, load = prepared_trainer(position, spec)
    (mini,) = batch.mini_batches
    samples = [sample for micro in mini.micro_batches[0] for sample in micro.samples]
    scores = torch.cat(trainer._learner.logprobs(load(batch).micro_batches))
    parts = scores.split([sample.num_response_tokens for sample in samples])
    return {(sample.group_id, sample.sample): part.numpy() for sample, part in zip(samples, parts, strict=True)}


@contextmanager
def scaled(parameters: list[torch.nn.Parameter], factor: float) -> Iterator[None]:
    """All weights times `factor`, and afterwards bitwise as before."""
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.data.mul_(factor)
    yield
    for p, old in zip(parameters, before, strict=True):
        p.data.copy_(old)


def gradients_of(position, parallel, spec, batch, algorithms):
    """By case: this rank's gradients [(tensor, box, values)] and, on the last stage, the metrics of its tokens."""
    from megatron_rl.model.parallel import device
    from megatron_rl.trainer.learner import Learner
    from megatron_rl.trainer.preparation import further_columns

    trainer, load = prepared_trainer(position, spec)
    parameters, found = dict(trainer._model.named_parameters()), {}
    mini = load(batch)
    for name, algorithm in algorithms.items():
        learner = Learner(
            trainer._policy,
            algorithm=algorithm,
            temperature=spec.temperature,
            max_response_tokens=spec.max_response_tokens,
            row_multiple=trainer.row_multiple,
            device=device(),
            models=trainer._further,
        )
        totals = learner._no_sums(0)
        further = further_columns([mini], trainer._further, learner._needed)
        with scaled(list(parameters.values()), OLD_SCALE):
            ((denominators, micros),) = learner._prepared([mini], further, totals)
        learner._update(mini, denominators, totals, further[0], micros)
        placed = [
            (p.hf_name, p.hf_slices, parameters[p.megatron_name].main_grad[p.megatron_slices].numpy().copy())
            for p in trainer._held
        ]
        found[name] = placed, {key: float(value) for key, value in totals.sums.items()}
    return found


def whole(outcomes, shapes) -> dict[str, torch.Tensor]:
    """Every tensor's gradient, put together from the ranks'."""
    found = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for placed in outcomes:
        for name, box, values in placed:
            found[name][box] = torch.from_numpy(values)
    return found


@dataclass(frozen=True)
class Everything:
    """Gradients of all cases, in one process and in any partition."""

    run: Callable[[ParallelConfig, int], tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, float]]]]
    """From a partition and most tokens of a micro batch to gradients and metrics by case."""
    directory: Path
    """Of the model."""
    samples: tuple[TrainingSample, ...]
    """Of the batch, all in one micro batch."""
    gradients: dict[str, dict[str, torch.Tensor]]
    """Of one process and one micro batch."""
    metrics: dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def everything(ranks, tmp_path_factory) -> Everything:
    directory = tmp_path_factory.mktemp("model")
    save_model("qwen3_tied", directory)
    shapes = {name: tensor.shape for name, tensor in load_file(directory / "model.safetensors").items()}
    algorithms = cases()

    def spec_of(parallel):
        spec = trainer_spec(directory, parallel, algorithm(kl={"place": "loss"}), weight_decay=0.0)
        # a clip scales gradients where they are compared, and would hide a wrong factor
        optimizer = spec.config.optimizer.model_copy(update={"learning_rate": 0.0, "clip_grad": 0.0})
        return replace(spec, config=spec.config.model_copy(update={"optimizer": optimizer}))

    plain = batch_for(SINGLE, algorithm(), max_tokens=WHOLE)
    (logprobs,) = ranks.run(logprobs_of, spec_of(SINGLE), plain, parallel=SINGLE)
    noise = np.random.default_rng(0)
    rollout = {key: values + noise.normal(0, 0.15, len(values)) for key, values in sorted(logprobs.items())}

    def near_the_policy(sample):
        columns = sample.columns
        of_group = [rollout[sample.group_id, index] for index in range(len(columns.offsets) - 1)]
        logprobs = np.concatenate(of_group).astype(np.float32)
        return replace(sample, columns=ColumnsRef(replace(columns, rollout_logprobs=logprobs)))

    def batch_of(parallel, max_tokens) -> TrainBatch:
        return replace_samples(batch_for(parallel, algorithm(), max_tokens=max_tokens), near_the_policy)

    def run(parallel, max_tokens):
        batch = batch_of(parallel, max_tokens)
        outcomes = ranks.run(gradients_of, spec_of(parallel), batch, algorithms, parallel=parallel)
        gradients = {name: whole([outcome[name][0] for outcome in outcomes], shapes) for name in algorithms}
        return gradients, {name: outcomes[-1][name][1] for name in algorithms}

    ((micro,),) = batch_of(SINGLE, WHOLE).mini_batches[0].micro_batches
    return Everything(run, directory, micro.samples, *run(SINGLE, WHOLE))


def test_the_cases_hold_every_loss_and_aggregation_of_the_page_and_clips_are_at_work(everything):
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    losses = re.findall(r"^\| `(\w+)` \|", page[page.index("## Losses") : page.index("## Advantages")], re.MULTILINE)
    (aggregations,) = re.findall(r"^\| `algorithm\.aggregation` \| ([^|]+) \|", page, re.MULTILINE)
    assert len(losses) >= 8 and set(losses) <= LOSSES.by_name.keys()
    assert set(re.findall(r"`(\w+)`", aggregations)) == AGGREGATIONS.by_name.keys()
    covered = {tuple(name.split(", ")) for name in everything.gradients}
    whole_sequence = {"gspo", "gmpo"}
    assert covered >= {(loss, each) for loss in set(losses) - whole_sequence for each in AGGREGATIONS.by_name}
    assert covered >= {(loss, "sequence_mean") for loss in whole_sequence}
    clipped = {name: metrics.get("actor/pg_clipfrac", 0.5) for name, metrics in everything.metrics.items()}
    assert [name for name, share in clipped.items() if not 0 < share < 1] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_loss_has_the_gradient_of_one_process_under_every_partition(everything, layout):
    gradients, _ = everything.run(*LAYOUTS[layout])
    for name, expected in everything.gradients.items():
        distances = {key: float((found - expected[key]).norm()) for key, found in gradients[name].items()}
        norms = {key: float(tensor.norm()) for key, tensor in expected.items()}
        assert math.hypot(*distances.values()) <= BOUND * math.hypot(*norms.values()), name
        for key, norm in norms.items():
            assert distances[key] <= BOUND_OF_A_TENSOR * norm, (name, key)


def logprobs_by_hugging_face(model: torch.nn.Module, sample: TrainingSample) -> torch.Tensor:
    """Log-probabilities of one response at temperature 0.9, [T]."""
    prompt, response = sample.columns.prompt_ids, sample.columns.response(sample.sample)
    logits = model(torch.from_numpy(np.concatenate([prompt, response])).long()[None]).logits[0]
    scores = (logits[len(prompt) - 1 : -1] / 0.9).log_softmax(-1)
    return scores.gather(1, torch.from_numpy(response).long()[:, None])[:, 0]


def naive_weights(name: str, log_ratios: list[torch.Tensor]) -> list[torch.Tensor]:
    """Importance weights of every response, [T] each, from old minus sampler's log-probabilities."""
    if name == "truncated weights":
        return [x.exp().clamp(max=CAP) for x in log_ratios]
    if name == "a rejection of tokens":
        return [x.exp().clamp(max=2.0) * (x.exp() - 1 - x <= REJECTED_K3) for x in log_ratios]
    if name == "normalised sequence weights":
        of_sequences = torch.stack([x.sum().exp().clamp(max=2.0) for x in log_ratios])
        return [weight.expand(len(x)) for weight, x in zip(of_sequences / of_sequences.mean(), log_ratios, strict=True)]
    return [x.exp().clamp(max=2.0) for x in log_ratios]


NAIVE = (
    "clipped_surrogate, sequence_mean",
    "truncated weights",
    "normalised sequence weights",
    "a rejection of tokens",
)


@pytest.mark.parametrize("name", NAIVE)
def test_the_gradient_of_one_process_is_hugging_faces_by_the_formula_of_the_paper(everything, name):
    """min(r A, clip(r) A), times the importance weight, in the mean over kept tokens or over sequences."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(everything.directory, dtype=torch.float32)
    with torch.no_grad(), scaled(list(model.parameters()), OLD_SCALE):
        old = [logprobs_by_hugging_face(model, sample) for sample in everything.samples]
    rollout = [torch.from_numpy(sample.columns.logprobs(sample.sample)) for sample in everything.samples]
    log_ratios = [one - other for one, other in zip(old, rollout, strict=True)]
    weights = naive_weights(name, log_ratios)
    num_kept = sum(int((weight > 0).sum()) for weight in weights)
    changed = float((torch.cat(weights) != torch.cat(log_ratios).exp()).float().mean())
    assert name not in ("truncated weights", "a rejection of tokens") or 0.1 < changed < 0.9, "of too few tokens"
    for sample, before, weight in zip(everything.samples, old, weights, strict=True):
        ratio, advantage = (logprobs_by_hugging_face(model, sample) - before).exp(), sample.advantage
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        count = len(weight) * len(weights) if "sequence_mean" in name else num_kept
        (-(weight * surrogate).sum() / count).backward()

    expected = {key: p.grad for key, p in model.named_parameters()}
    assert everything.gradients[name].keys() == expected.keys()
    for key, found in everything.gradients[name].items():
        assert float((found - expected[key]).norm()) <= BOUND_OF_A_TENSOR * float(expected[key].norm()), key
