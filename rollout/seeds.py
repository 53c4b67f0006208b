"""One seed per sampled response, as a pure function of what the response is (decision 43).

There is no global generator: a resumed run, or one whose engines finish in another order, samples
the same response for the same (run seed, purpose, step, prompt, sample).
"""

import hashlib

from rollout.types import PromptId


def derive_seed(run_seed: int, *, purpose: str, step: int, prompt_id: PromptId, sample: int) -> int:
    """Return the 63-bit seed of one response.

    Args:
        run_seed: the run's own seed.
        purpose: what the response is for, such as `train` or the name of an evaluation set.
        step: step for which it is sampled.
        prompt_id: the prompt it answers.
        sample: number of the response in its group.
    """
    key = "\x1f".join((str(run_seed), purpose, str(step), prompt_id, str(sample)))
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def continued_seed(seed: int, num_tokens: int) -> int:
    """Return the seed of the rest of a response of which `num_tokens` are there; `seed` itself of none.

    The same seed once more would draw the same numbers as for the beginning.
    """
    if num_tokens == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}\x1f{num_tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
