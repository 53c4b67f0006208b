"""Seeds are a stable function of their key."""

import itertools

from rollout.seeds import derive_seed
from rollout.types import PromptId


def seed(run=1, purpose="train", step=0, prompt="d/0", sample=0):
    return derive_seed(run, purpose=purpose, step=step, prompt_id=PromptId(prompt), sample=sample)


def test_a_seed_never_changes_between_releases():
    assert seed() == 8824829998241888040


def test_seeds_fit_63_bits():
    assert all(0 <= seed(sample=s) < 1 << 63 for s in range(1000))


def test_every_part_of_the_key_changes_the_seed():
    keys = itertools.product((1, 2), ("train", "math"), (0, 1, 10), ("d/0", "d/1", "d/10"), range(4))
    seeds = [seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)


def test_keys_that_join_to_the_same_text_have_different_seeds():
    assert seed(step=1, prompt="1/0") != seed(step=11, prompt="/0")


def test_every_bit_of_a_seed_is_set_about_half_the_time():
    ones = [sum(seed(sample=s) >> bit & 1 for s in range(2000)) for bit in range(63)]
    assert all(850 < count < 1150 for count in ones)
