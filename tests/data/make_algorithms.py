"""Makes `algorithms.json`: what verl and slime compute for random tokens.

`python tests/data/make_algorithms.py SLIME` with verl 0.9.1 installed and a checkout of https://github.com/THUDM/slime
(the file was made at commit 624b824a, version 0.3.1). Everything is in float64. Rows are padded; `mask` marks the
tokens of responses.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
from omegaconf import OmegaConf
from verl.trainer.config.algorithm import AlgoConfig, RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

LENGTHS = (5, 1, 11, 12, 3, 8)
GROUPS = (0, 0, 0, 1, 1, 1)
REWARDS = (1.0, 0.0, 0.5, 0.0, 0.0, 1.0)


def inputs() -> dict[str, torch.Tensor]:
    """Padded rows of every column."""
    generator = torch.Generator().manual_seed(7)
    shape = (len(LENGTHS), max(LENGTHS))

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).double()
    old = -normal(1.0).abs() - 0.05
    return {
        "old": old,
        "new": (old + normal(0.4)).clamp(max=-0.01),
        "near": (old + normal(5e-4)).clamp(max=-0.01),
        "rollout": (old + normal(0.05)).clamp(max=-0.01),
        "ref": (old + normal(0.3)).clamp(max=-0.01),
        "values": normal(0.5),
        "weights": 1.0 + normal(0.2).clamp(-0.5, 0.5),
        "advantages": torch.randn(shape[0], 1, generator=generator, dtype=torch.float64).expand(shape).contiguous(),
        "mask": mask,
    }


def actor(**settings: object) -> ActorConfig:
    """verl's configuration of an actor."""
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)


VERL_LOSSES: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "clipped": (
        "vanilla",
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0},
        {"name": "clipped_surrogate", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    ),
    "gspo": ("gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, {"name": "gspo"}),
    "cispo": (
        "cispo",
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
        {"name": "cispo", "clip_low": 0.2, "clip_high": 0.28},
    ),
    "sapo": (
        "sapo",
        {"tau_pos": 1.0, "tau_neg": 1.05},
        {"name": "sapo", "tau_positive": 1.0, "tau_negative": 1.05},
    ),
    "gmpo": ("geo_mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}, {"name": "gmpo"}),
    "dppo tv": (
        "dppo_tv",
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08, "clip_ratio_c": 1.5},
        {"name": "dppo", "bound_low": 0.05, "bound_high": 0.08, "ratio_cap": 1.5},
    ),
    "dppo kl": (
        "dppo_kl",
        {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 1.5},
        {"name": "dppo", "divergence": "kl", "bound_low": 0.02, "bound_high": 0.03, "ratio_cap": 1.5},
    ),
}
AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
}
OF_SEQUENCES = ("gspo", "sapo", "gmpo")
"""Losses that verl aggregates by sequence whatever it is told."""


def with_gradient(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> dict[str, object]:
    """Value and gradient of a scalar."""
    point = at.clone().requires_grad_()
    value = function(point)
    value.backward()
    return {"value": value.item(), "gradient": point.grad.tolist()}


def verl_losses(columns: dict[str, torch.Tensor]) -> list[dict[str, object]]:
    """Every loss with weights of the correction, and one loss under every aggregation."""
    cases = []
    for name, (theirs, settings, ours) in VERL_LOSSES.items():
        for aggregation in ["sequence_mean"] if name in OF_SEQUENCES else list(AGGREGATIONS):
            logprobs = "near" if name == "gspo" else "new"
            weights = None if name == "gmpo" else columns["weights"]

            def loss(
                new: torch.Tensor,
                theirs: str = theirs,
                settings: dict[str, object] = settings,
                aggregation: str = aggregation,
                weights: torch.Tensor | None = weights,
            ) -> torch.Tensor:
                value, _ = core_algos.get_policy_loss_fn(theirs)(
                    old_log_prob=columns["old"],
                    log_prob=new,
                    advantages=columns["advantages"],
                    response_mask=columns["mask"],
                    loss_agg_mode=AGGREGATIONS[aggregation],
                    config=actor(**settings),
                    rollout_is_weights=weights,
                )
                return value

            case = {"loss": ours, "aggregation": aggregation, "logprobs": logprobs, "weighted": weights is not None}
            cases.append(case | with_gradient(loss, columns[logprobs]))
    return [*cases, verl_reinforce(columns), verl_bypass(columns)]


def verl_reinforce(columns: dict[str, torch.Tensor]) -> dict[str, object]:
    def loss(new: torch.Tensor) -> torch.Tensor:
        value, _ = core_algos.compute_policy_loss_reinforce(
            rollout_log_prob=columns["rollout"],
            log_prob=new,
            advantages=columns["advantages"],
            response_mask=columns["mask"],
            loss_agg_mode="token-mean",
            config=actor(),
            rollout_is_weights=columns["weights"],
        )
        return value

    case = {"loss": {"name": "reinforce"}, "aggregation": "token_mean", "logprobs": "new", "weighted": True}
    return case | with_gradient(loss, columns["new"])


def verl_bypass(columns: dict[str, torch.Tensor]) -> dict[str, object]:
    """verl's bypass mode gets the sampler's log-probabilities as the old ones."""
    config = actor(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
    correction = {"loss_type": "ppo_clip", "rollout_is": None, "rollout_rs": None}
    object.__setattr__(config, "policy_loss", OmegaConf.create({"rollout_correction": correction}))

    def loss(new: torch.Tensor) -> torch.Tensor:
        value, _ = core_algos.get_policy_loss_fn("bypass_mode")(
            old_log_prob=columns["rollout"],
            log_prob=new,
            advantages=columns["advantages"],
            response_mask=columns["mask"],
            loss_agg_mode="token-mean",
            config=config,
        )
        return value

    ours = {"name": "bypass", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    case = {"loss": ours, "aggregation": "token_mean", "logprobs": "new", "weighted": False}
    return case | with_gradient(loss, columns["new"])


def token_rewards(columns: dict[str, torch.Tensor], penalty: float = 0.0) -> torch.Tensor:
    """The reward of a response at its last token, minus k3 of every token."""
    rewards = torch.zeros_like(columns["mask"])
    rewards[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] = torch.tensor(REWARDS, dtype=torch.float64)
    kl = core_algos.kl_penalty(columns["old"], columns["ref"], "k3") * columns["mask"]
    return rewards - penalty * kl


def verl_advantages(columns: dict[str, torch.Tensor]) -> list[dict[str, object]]:
    """Advantages [B, L] of every estimator that is built in."""
    mask, index = columns["mask"], np.array(GROUPS)
    plain, penalised = token_rewards(columns), token_rewards(columns, 0.1)
    config = AlgoConfig(gamma=0.97)
    whole = AlgoConfig(gamma=1.0)
    by_group = {
        "grpo": core_algos.compute_grpo_outcome_advantage,
        "rloo": core_algos.compute_rloo_outcome_advantage,
        "opo": core_algos.compute_opo_outcome_advantage,
        "reinforce_plus_plus_baseline": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage,
    }
    values: dict[str, tuple[object, torch.Tensor]] = {
        name: (name, function(plain, mask, index)[0]) for name, function in by_group.items()
    }
    values["dr_grpo"] = (
        "dr_grpo",
        core_algos.compute_grpo_outcome_advantage(plain, mask, index, norm_adv_by_std_in_grpo=False)[0],
    )
    returns = core_algos.compute_reinforce_plus_plus_outcome_advantage
    values["reinforce_plus_plus"] = ("reinforce_plus_plus", returns(plain, mask, whole)[0])
    gae = core_algos.compute_gae_advantage_return(penalised, columns["values"], mask, 0.97, 0.9)
    values["gae"] = ({"name": "gae", "gamma": 0.97, "lam": 0.9}, gae[0])
    discounted = returns(penalised, mask, config)
    values["discounted_returns"] = ({"name": "discounted_returns", "gamma": 0.97}, discounted[0])
    cases = [{"advantage": ours, "values": (result * mask).tolist()} for ours, result in values.values()]
    extra = {"gae": gae[1], "discounted_returns": discounted[1]}
    for case in cases:
        name = case["advantage"]["name"] if isinstance(case["advantage"], dict) else ""
        if name in extra:
            case["returns"] = (extra[name] * mask).tolist()
    return cases


def verl_kl(columns: dict[str, torch.Tensor]) -> dict[str, object]:
    """Estimates at each token."""
    kl = {name: core_algos.kl_penalty(columns["new"], columns["ref"], name) for name in ("k1", "k2", "k3")}
    return {name: (values * columns["mask"]).tolist() for name, values in kl.items()}


def verl_controller() -> list[dict[str, float]]:
    """Coefficients after steps of an adaptive controller."""
    controller = core_algos.AdaptiveKLController(init_kl_coef=0.01, target_kl=0.1, horizon=1000)
    steps = []
    for kl, responses in ((0.05, 64), (0.11, 128), (0.5, 256), (0.1, 64)):
        controller.update(kl, responses)
        steps.append({"kl": kl, "responses": responses, "coefficient": controller.value})
    return steps


def verl_presets() -> dict[str, dict[str, object]]:
    """Every preset of the rollout correction."""
    names = [name for name in vars(RolloutCorrectionConfig) if name.startswith(("decoupled_", "bypass_"))]
    fields = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type")
    presets = {}
    for name in names:
        if callable(method := getattr(RolloutCorrectionConfig, name)):
            config = method()
            presets[name] = {field: getattr(config, field) for field in fields}
    return presets


def slime_values(columns: dict[str, torch.Tensor]) -> dict[str, object]:
    """slime's losses of tokens, divergence and advantages; without means, which it takes elsewhere."""
    from slime.utils import ppo_utils

    mask, new, old, advantages = (columns[name] for name in ("mask", "new", "old", "advantages"))
    clipped = ppo_utils.compute_policy_loss(old - new, advantages, 0.2, 0.28, 3.0)[0]
    cispo = ppo_utils.compute_cispo_loss(old - new, new, advantages, 1.0, 0.3)[0]
    rows = [slice(0, length) for length in LENGTHS]
    parts = [[column[row, part] for row, part in enumerate(rows)] for column in (columns["near"], old)]
    ones = [torch.ones(length, dtype=torch.float64) for length in LENGTHS]
    kl = ppo_utils.compute_gspo_kl(parts[0], parts[1], parts[0], ones)
    packed = torch.cat([advantages[row, part] for row, part in enumerate(rows)])
    gspo = ppo_utils.compute_policy_loss(kl, packed, 3e-4, 4e-4)[0]
    ratio = (new - old).exp()
    unbiased = ppo_utils.compute_approx_kl(new, columns["ref"], "k3", ratio)
    rewards = token_rewards(columns, 0.1)
    gae = [
        ppo_utils.chunked_gae(rewards[row : row + 1, part], columns["values"][row : row + 1, part], 0.97, 0.9)
        for row, part in enumerate(rows)
    ]
    return {
        "clipped": (clipped * mask).tolist(),
        "cispo": (cispo * mask).tolist(),
        "gspo": gspo.tolist(),
        "k3_unbiased": (unbiased * mask).tolist(),
        "gae": [advantage[0].tolist() for advantage, _ in gae],
        "gae_returns": [returns[0].tolist() for _, returns in gae],
    }


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    columns = inputs()
    content = {
        "source": "verl 0.9.1, and slime 0.3.1 at commit 624b824a; made by make_algorithms.py",
        "lengths": LENGTHS,
        "groups": GROUPS,
        "rewards": REWARDS,
        "columns": {name: values.tolist() for name, values in columns.items()},
        "verl": {
            "losses": verl_losses(columns),
            "advantages": verl_advantages(columns),
            "kl": verl_kl(columns),
            "controller": verl_controller(),
            "presets": verl_presets(),
        },
        "slime": slime_values(columns),
    }
    rounded = json.loads(json.dumps(content), parse_float=lambda text: float(f"{float(text):.12g}"))
    (Path(__file__).parent / "algorithms.json").write_text(json.dumps(rounded, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
