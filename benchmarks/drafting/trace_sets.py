"""The cases of `benchmarks.drafting`: a model of how responses change, their length, and their reuse."""

from dataclasses import dataclass

from benchmarks.drafting import phrases, traces
from history.store.traces import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Generated responses of two epochs."""

    length: str
    """Name of the length of a response: 2k or 16k."""
    reuse: float
    is_first: bool = False
    """Whether it is the case of its model and length in which all methods decode the first epoch."""
    is_other: bool = False
    """Whether the responses are of the second model, of phrases."""

    @property
    def name(self) -> str:
        """Name in records."""
        model = "phrases, " if self.is_other else ""
        return f"{self.length}, {model}reuse {100 * self.reuse:.0f} %"

    def generate(self, num_tokens: int, num_prompts: int, seed: int) -> list[Trace]:
        """The responses, ordered by epoch (their step)."""
        make = phrases.generate if self.is_other else traces.generate
        return make(reuse=self.reuse, num_tokens=num_tokens, num_prompts=num_prompts, seed=seed).traces


MISSED = 0.87
"""Reuse at which epoch 1 is also decoded without the history of epoch 0."""
CASES = tuple(
    Case(length="2k", reuse=reuse, is_first=number == 0)
    for number, reuse in enumerate((0.93, 0.87, 0.76, 0.6, 0.4, 0.2, 0.0))
)
OTHER_CASES = tuple(
    Case(length="2k", reuse=reuse, is_first=number == 0, is_other=True) for number, reuse in enumerate((0.93, 0.76))
)
LONG_CASES = tuple(Case(length="16k", reuse=reuse, is_first=number == 0) for number, reuse in enumerate((0.93, 0.87)))
