"""The algorithm: a line of stages, each a function with settings of its own that the configuration names.

| stage | key in `algorithm` | runs on | input | output |
|---|---|---|---|---|
| filter of rewards | `filter` | controller | `GroupOutcome`, rewards as scored | bool: keep the group |
| reward shaping | `reward_shaping` | controller | `GroupOutcome`, rewards as scored | [N] rewards |
| advantage of a group | `advantage` | controller | `GroupOutcome`, shaped rewards | [N] |
| advantage of a batch | `advantage` | controller | `BatchOutcome`, all groups of the step | [sum of N] |
| filter of signals | `filter` | controller | `GroupSignal` | bool: keep the group |
| advantage of tokens | `advantage` | trainer, after all forwards | `TokenOutcome` | `TokenAdvantages`, [T] |
| correction | `correction` | trainer | `PackedLogprobs` | weights [T], counted tokens [T] |
| aggregation | `aggregation` | trainer | `MeanInputs` | shares of the mean [T] |
| loss | `loss` | trainer | `LossInputs` | `TokenLosses`, [T] |
| objective | `kl`, `entropy` | trainer | losses, weights, shares, divergence, entropy | a scalar |

N: responses of a group; T: response tokens of a micro batch. The type of a function's first parameter says which line
it is (`plug_in`); the controller's functions know numpy only. Every function of one's own replaces one of a built-in
stage; the correction is one composed function (`CorrectionConfig`), because its metrics belong to its modes.

A response token that the policy has not sampled (`loss_mask`) has no share of a loss, of a mean or of a metric, and
the correction does not see it. A mean over a sequence is `LossInputs.sequence_mean`.

`ref` and `values` are columns of further models: a function declares them by `@needs`, and the trainer runs those
forwards only if one does.
"""
