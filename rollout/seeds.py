"""One seed per sampled response, as a pure function of (run seed, purpose, step, prompt, sample) (decision 43).

There is no global generator: a resumed run, or a run whose engines finish in another order, samples the same response
for the same arguments.
"""

import hashlib

from rollout.types import PromptId


def derive_seed(
    run_seed: int, *, purpose: str, step: int, prompt_id: PromptId, sample: int, occurrence: int = 0
) -> int:
    """Return the 63-bit seed of one response.

    Args:
        run_seed: the run's own seed.
        purpose: `train`, or the name of an evaluation set.
        step: step for which the response is sampled.
        prompt_id: the prompt of the response.
        sample: number of the response in its group.
        occurrence: number of earlier draws of the prompt in the same step; without it, copies of a prompt would sample
            the same responses.
    """
    parts = [str(run_seed), purpose, str(step), prompt_id, str(sample), *([str(occurrence)] if occurrence else [])]
    key = "\x1f".join(parts)
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def continued_seed(seed: int, num_tokens: int) -> int:
    """Return the seed for the rest of a response that has `num_tokens` tokens; `seed` itself for 0.

    The same seed would draw the numbers of the response's beginning again.
    """
    if num_tokens == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}\x1f{num_tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
