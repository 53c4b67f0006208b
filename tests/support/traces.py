"""Small traces, written by hand."""

from collections.abc import Sequence

import numpy as np

from history.store.traces import Trace


def trace(
    response: Sequence[int], *, prompt: Sequence[int] = (900, 901), step: int = 0, sample: int = 0, reward: float = 0.0
) -> Trace:
    return Trace(
        step=step,
        prompt_id="prompt",
        sample=sample,
        prompt_ids=np.array(prompt, dtype=np.int32),
        response_ids=np.array(response, dtype=np.int32),
        reward=reward,
    )
