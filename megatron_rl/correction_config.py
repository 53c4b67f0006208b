"""Configuration of the correction for the difference between sampler and trainer."""

from collections.abc import Mapping
from typing import Literal, get_args

from pydantic import Field, model_validator

from history.config import Config

Preset = Literal[
    "none", "decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop", "decoupled_seq_is_rs",
    "decoupled_geo_rs", "decoupled_geo_rs_seq_tis", "decoupled_geo_rs_token_tis", "decoupled_k3_rs",
    "decoupled_k3_rs_seq_tis", "decoupled_k3_rs_token_tis", "bypass_ppo_clip", "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs", "bypass_pg_is", "bypass_pg_token_icepop", "bypass_pg_geo_rs", "bypass_pg_geo_rs_seq_tis",
    "bypass_pg_geo_rs_token_tis",
]  # fmt: skip
"""verl 0.9.1's presets of its rollout correction."""
BYPASS_PRESETS = {
    name: "pg" if name.startswith("bypass_pg") else "clip" for name in get_args(Preset) if name.startswith("bypass")
}
"""Kind of loss that a preset is made for: the clipped surrogate, or REINFORCE."""


class RejectionConfig(Config):
    """A hard trust region on the divergence between trainer and sampler.

    With lr = old_logprobs - rollout_logprobs: k1 = -lr, k2 = lr^2 / 2, k3 = exp(lr) - 1 - lr.
    """

    statistic: Literal[
        "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
        "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
    ]  # fmt: skip
    """`token_*` rejects single tokens. `seq_*` takes the sum, mean or maximum over a sequence and rejects sequences."""
    high: float = Field(gt=0)
    """Upper bound: of k2 and k3 themselves (0.01 is common for `seq_mean_k3`), of the ratio exp(k1) for k1."""
    low: float = Field(default=0.0, ge=0)
    """Lower bound of the ratio exp(k1), at most 1; refused for k2 and k3. 0 means 1 / high."""


class CorrectionConfig(Config):
    """Importance weights that correct for the difference between the quantised sampler and the trainer."""

    preset: Preset = "none"
    """Sets `mode`, `cap`, `low` and `rejections` as verl's preset of this name does. A key that it sets can have no
    other value; without a preset every combination is possible.
    `bypass_ppo_clip*` needs `loss` = bypass, `bypass_pg*` needs `loss` = reinforce."""
    mode: Literal["none", "tis_token", "tis_sequence", "icepop", "icepop_sequence", "mis_product", "mis_geometric"] = (
        "tis_token"
    )
    """Kind of importance weight. `tis_*` truncates the ratio per token or sequence. `icepop*` sets ratios outside a
    band to zero. `mis_*` masks whole sequences whose ratio is outside the band."""
    cap: float = Field(default=2.0, gt=0)
    """Upper bound of the ratio: the cap of truncated importance sampling, or the upper end of the band. At least 1,
    the ratio of equal log-probabilities."""
    low: float = Field(default=0.5, ge=0)
    """Lower end of the band (`icepop*`, `mis_*`), at most 1."""
    veto_ratio: float = Field(default=0.0, ge=0)
    """Sequences with a token whose ratio is below this are rejected and counted (1e-4 is common). 0 turns this off."""
    batch_normalize: bool = False
    """Divide importance weights by their mean over the step."""
    rejected_in_denominators: bool = False
    """Whether rejected tokens count in the means of the loss. false, as in verl: a mean is over the kept tokens. The
    trainer then needs all log-probabilities of a step before its first update, which costs one more forward. true: no
    further forward, but the more is rejected, the smaller the gradient. Rejected by `mis_*`, `veto_ratio` or
    `rejections`."""
    rejections: tuple[RejectionConfig, ...] = ()
    """Hard trust regions. Tokens and sequences outside any of them are left out of the loss and counted."""

    @property
    def is_mask(self) -> bool:
        """Whether the mode's weights are 1 for kept tokens and 0 for rejected ones."""
        return self.mode in ("mis_product", "mis_geometric")

    @property
    def has_band(self) -> bool:
        """Whether the mode keeps ratios between `low` and `cap` only."""
        return self.is_mask or self.mode in ("icepop", "icepop_sequence")

    @property
    def counts_kept_tokens(self) -> bool:
        """Whether the loss's denominators wait for log-probabilities, because rejected tokens leave them."""
        can_reject = self.is_mask or self.veto_ratio > 0 or bool(self.rejections)
        return can_reject and not self.rejected_in_denominators

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: object) -> object:
        """The keys that a preset sets, where they are not given."""
        if not isinstance(value, Mapping):
            return value
        name = value.get("preset", "none")
        keys = {**preset_keys(name), **value} if name in get_args(Preset) else dict(value)
        if isinstance(rules := keys.get("rejections"), list):
            keys["rejections"] = tuple(rules)  # what follows a validator is no JSON any more, and strict
        return keys


def preset_keys(name: str) -> dict[str, object]:
    """Keys of a preset, without the loss that it is made for."""
    if name == "none":
        return {}
    weighted = name.removesuffix("_rs") if name == "decoupled_seq_is_rs" else name
    keys: dict[str, object] = {"mode": "none"}
    if name.endswith("icepop"):
        keys = {"mode": "icepop", "low": 0.5, "cap": 5.0}
    elif weighted.endswith(("token_is", "token_tis")):
        keys = {"mode": "tis_token", "cap": 2.0}
    elif weighted.endswith(("seq_is", "seq_tis", "pg_is")):
        keys = {"mode": "tis_sequence", "cap": 2.0}
    if "geo_rs" in name:
        keys["rejections"] = [{"statistic": "seq_mean_k1", "low": 0.999, "high": 1.001}]
    elif "k3_rs" in name:
        keys["rejections"] = [{"statistic": "seq_mean_k3", "high": 0.01}]
    elif name == "decoupled_seq_is_rs":
        keys["rejections"] = [{"statistic": "seq_sum_k1", "low": 0.5, "high": 2.0}]
    return keys
