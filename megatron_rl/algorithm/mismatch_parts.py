"""Splits the gap between sampler and trainer into its causes, on a sample of a step's tokens.

Three log-probabilities of a sampled token are compared: the trainer's (`old`), the trainer's under the published
weights (`codes`: every weight after its round trip through the wire format), and the engine's (`rollout`).

    lr = old - rollout = (old - codes) + (codes - rollout) = q + n

q is the effect of quantised weights. n is everything else: the engine's kernels, which include 8-bit activations, the
age of the weights that sampled the token, and what speculation does. k3 splits exactly:

    k3(q + n) = k3(q) + k3(n) + (exp(q) - 1)(exp(n) - 1)

| part           | of the sample's mean k3                                                             |
|----------------|-------------------------------------------------------------------------------------|
| `quantisation` | mean of k3(q)                                                                       |
| `numerics`     | mean of k3(n) over fresh tokens that do not stand where a draft was rejected: base  |
| `speculation`  | share of tokens at rejected drafts, times what k3(n) of the fresh ones is above base |
| `stale_{age}`  | k3(n) of tokens of this age above what base and speculation explain, over all tokens |
| `interaction`  | mean of the product; near 0 if the causes are independent                           |

A fresh token was sampled from the weights that the trainer has published last. The codes of older weights are gone, so
q of a stale token is taken with the present codes, and the difference counts as staleness.

A token at a rejected draft is an unlikely one by selection, so a healthy run has a positive part there as well.

Invariants: the parts add up to the sample's mean k3. Sums of micro batches and ranks add up. Without fresh tokens
numerics cannot be told from staleness: `numerics` and `speculation` are absent, and `stale_{age}` contains them.

Shape legend: T tokens, A ages (0 .. the step's largest staleness).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithm.columns import LOG_RATIO_BOUND
from megatron_rl.algorithm.correction import k3

_TERMS = ("tokens", "k3_codes", "k3_rest", "cross", "codes", "codes_squared", "rest", "rest_squared", "w", "w_squared")
"""Of each cell. `codes`, `rest` and `w` are the ratios exp(q), exp(n) and exp(lr)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Tokens of the sample on one rank; float32 [T] unless stated otherwise."""

    old_logprobs: Tensor
    """Of the trainer."""
    code_logprobs: Tensor
    """Of the trainer under the published weights."""
    rollout_logprobs: Tensor
    """Of the engine."""
    ages: Tensor
    """int64 [T], policy versions since the weights that sampled the token."""
    resampled: Tensor
    """bool [T], whether the token stands where a draft was rejected."""


@dataclass(slots=True)
class PartSums:
    """Sums by age and by origin. `add` mutates; sums of all ranks are added up."""

    sums: Tensor
    """[A, 2, terms] float64, on the device of the tokens; [:, 1] holds tokens at rejected drafts."""

    @classmethod
    def empty(cls, max_staleness: int, device: torch.device | None = None) -> "PartSums":
        """Sums for a step with this largest staleness; on the CPU if no device is given."""
        return cls(torch.zeros(max_staleness + 1, 2, len(_TERMS), dtype=torch.float64, device=device))

    def add(self, tokens: SampledTokens) -> None:
        """Add tokens of this rank."""
        codes = _ratio(tokens.old_logprobs - tokens.code_logprobs)
        rest = _ratio(tokens.code_logprobs - tokens.rollout_logprobs)
        both = _bounded(codes + rest)
        terms = torch.stack(
            [
                torch.ones_like(codes),
                k3(codes),
                k3(rest),
                k3(both) - k3(codes) - k3(rest),
                codes.exp(),
                (2 * codes).exp(),
                rest.exp(),
                (2 * rest).exp(),
                both.exp(),
                (2 * both).exp(),
            ]
        )
        cells = 2 * tokens.ages + tokens.resampled.long()
        self.sums = self.sums.flatten(0, 1).index_add(0, cells, terms.T).reshape(self.sums.shape)

    def metrics(self) -> dict[str, float]:
        """Parts of k3, and the effective sample size (as a share) of each cause's ratios; empty without tokens."""
        cells = [[dict(zip(_TERMS, cell, strict=True)) for cell in age] for age in self.sums.tolist()]
        whole = _total([cell for age in cells for cell in age])
        if not whole["tokens"]:
            return {}
        return {
            "rollout_corr/part_tokens": whole["tokens"],
            "rollout_corr/part_fresh_tokens": _total(cells[0])["tokens"],
            **{f"rollout_corr/part_k3/{name}": value for name, value in _k3_parts(cells, whole).items()},
            **{f"rollout_corr/part_ess/{name}": value for name, value in _sample_sizes(cells, whole).items()},
        }


_Cell = dict[str, float]


def _k3_parts(cells: list[list[_Cell]], whole: _Cell) -> dict[str, float]:
    plain, resampled = cells[0]
    count = whole["tokens"]
    parts = {"total": (whole["k3_codes"] + whole["k3_rest"] + whole["cross"]) / count}
    parts["quantisation"] = whole["k3_codes"] / count
    parts["interaction"] = whole["cross"] / count
    base = extra = 0.0
    if fresh := plain["tokens"] + resampled["tokens"]:
        of_plain = plain if plain["tokens"] else resampled
        base = of_plain["k3_rest"] / of_plain["tokens"]
        if plain["tokens"] and resampled["tokens"]:
            extra = resampled["k3_rest"] / resampled["tokens"] - base
        parts["numerics"] = base
        parts["speculation"] = extra * sum(age[1]["tokens"] for age in cells) / count
    for number, age in enumerate(cells):
        of_age = _total(age)
        if of_age["tokens"] and (number or not fresh):
            explained = base * of_age["tokens"] + extra * age[1]["tokens"]
            parts[f"stale_{number}"] = (of_age["k3_rest"] - explained) / count
    return parts


def _sample_sizes(cells: list[list[_Cell]], whole: _Cell) -> dict[str, float]:
    plain, resampled = cells[0]
    sizes = {"total": _share(whole, "w"), "quantisation": _share(whole, "codes")}
    if plain["tokens"]:
        sizes["numerics"] = _share(plain, "rest")
    if resampled["tokens"]:
        sizes["speculation"] = _share(resampled, "rest")
    for number, age in enumerate(cells):
        of_age = _total(age)
        if number and of_age["tokens"]:
            sizes[f"stale_{number}"] = _share(of_age, "rest")
    return sizes


def _share(cell: _Cell, ratio: str) -> float:
    """Effective sample size of a ratio over a cell's tokens, as a share of them."""
    return cell[ratio] ** 2 / (cell["tokens"] * cell[f"{ratio}_squared"])


def _total(cells: list[_Cell]) -> _Cell:
    return {name: sum(cell[name] for cell in cells) for name in _TERMS}


def _ratio(log_ratio: Tensor) -> Tensor:
    return _bounded(log_ratio.double())


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
