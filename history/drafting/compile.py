"""Compiles the history's kernels into numba's cache: once per installation, half a minute of one core.

`make setup` ends with `python -m history.drafting.compile`, so that a run's first engine and first segment need not
wait. Without it the first drafting process compiles; several processes that start together compile at once.

The module drafts a small response from a segment with the same tokens, as an engine does.
"""

import tempfile
import time
from pathlib import Path

import numpy as np

from history.drafting.drafter import Drafter
from history.drafting.forward_cost import ForwardCostModel
from history.index.segment import attach_segment, build_segment, write_segment
from history.types import PastResponse

_KEY = 1
_PROMPT = [1, 2]
_RESPONSE = [3, 4, 5, 6, 7, 8, 9, 10] * 80
"""Long enough to outgrow the first index of a living text."""
_ROOM = 4


def compile_kernels() -> float:
    """Compile or load the kernels of an engine and a reader; return the tokens emitted per forward.

    Loading compiled kernels takes about a second.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        past = PastResponse(token_ids=np.array(_RESPONSE, dtype=np.int32), step=0, sample=0)
        write_segment(folder, build_segment(_KEY, 1, [past]))
        attach_segment(folder, _KEY)
        emitted = [_draft(folder, None), _draft(folder, ForwardCostModel())]
    return min(emitted)


def _draft(folder: Path, cost_model: ForwardCostModel | None) -> float:
    drafter = Drafter(max_draft_tokens=_ROOM, segments_dir=str(folder), cost_model=cost_model)
    text = np.array([_PROMPT + _RESPONSE], dtype=np.int32)
    draft_row = drafter.open(prompt_key=_KEY, prompt_length=len(_PROMPT), max_length=text.shape[1])
    place, num_forwards = len(_PROMPT) + 1, 0
    while place < text.shape[1]:
        room = min(_ROOM, text.shape[1] - place)
        (draft,) = drafter.propose(
            *(np.array([draft_row]), text), *(np.array([x], dtype=np.int32) for x in (place, room))
        )
        if cost_model is not None:
            cost_model.observe(num_rows=1, num_tokens=1 + len(draft), num_context_tokens=place, seconds=0.01)
        num_accepted = int(np.cumprod(np.array(draft, dtype=np.int32) == text[0, place : place + len(draft)]).sum())
        place, num_forwards = place + num_accepted + 1, num_forwards + 1
    drafter.close(draft_row)
    drafter.drain()
    return float(text.shape[1] - len(_PROMPT) - 1) / num_forwards


if __name__ == "__main__":
    began = time.perf_counter()
    compile_kernels()
    print(f"compiled the kernels of the history in {time.perf_counter() - began:.0f} s")
