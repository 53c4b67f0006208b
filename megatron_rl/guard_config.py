"""Configuration of the guard (`megatron_rl.algorithm.guard`)."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from history.config import Config


class GuardConfig(Config):
    """Watches the gap between sampler and trainer, and acts on it with hysteresis."""

    mode: Literal["off", "advise", "act"] = "off"
    """`advise`: actions are logged and recorded, and change nothing. Each level is advised as if those below had no
    effect. `act`: actions are taken."""
    min_ess: float = Field(default=0.95, gt=0, lt=1)
    """A step with a smaller effective sample size of the importance weights is bad."""
    max_k3: float = Field(default=5e-3, gt=0)
    """A step with a larger k3 is bad, in nats per token."""
    max_tail: float = Field(default=1.0, gt=0)
    """A step is bad if more than 0.1 % of its tokens have a larger absolute log ratio, in nats."""
    patience: int = Field(default=5, gt=0)
    """Bad steps in a row before an action. There is at most one action in so many steps."""
    recover_after: int = Field(default=30, gt=0)
    """Healthy steps in a row before the last action is taken back. A relapse doubles it, at most to eight times."""
    margin: float = Field(default=0.5, gt=0, lt=1)
    """A step is healthy if no value is further on its way to the bound than this share."""
    caps: tuple[float, ...] = (1.5, 1.2)
    """Successive caps of the correction, those below `algorithm.correction.cap` and, in a mode with a band, above
    `algorithm.correction.low`. Not for a mode without a cap."""
    bf16_layers: tuple[float, ...] = (0.25, 0.5)
    """Successive shares of the 8-bit decoder layers that become BF16, those with the worst SQNR first. Engines and
    trainer start again from a checkpoint for it."""
    lower_overlap: bool = True
    """Lower `planner.overlap` by one at a time, down to 0."""
    bf16_rollouts: bool = True
    """As the last action, sample with BF16 weights, keys and values. Engines and trainer start again from a
    checkpoint for it."""

    @field_validator("mode", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        """YAML reads `off` as false."""
        return "off" if value is False else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.recover_after < self.patience:
            raise PydanticCustomError(
                "guard",
                "`recover_after` = {recover} is below `patience` = {patience}; actions would alternate; raise it",
                {"recover": self.recover_after, "patience": self.patience},
            )
        if any(cap < 1 for cap in self.caps) or list(self.caps) != sorted(self.caps, reverse=True):
            raise PydanticCustomError(
                "guard", "`caps` = {caps} must fall, and not below 1", {"caps": str(list(self.caps))}
            )
        if any(not 0 < share < 1 for share in self.bf16_layers):
            raise PydanticCustomError(
                "guard",
                "`bf16_layers` = {shares} must lie between 0 and 1; all layers are `bf16_rollouts`",
                {"shares": str(list(self.bf16_layers))},
            )
        return self
