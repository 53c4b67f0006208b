"""The program that scores all stacks answers with the weights that it is given, and with nothing of those before."""

import multiprocessing
import zlib
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.end_to_end import chains, model, score
from benchmarks.end_to_end.peers import task

SEED = 7


def fingerprints(first: Path, held_out: Path, scored: list[Path]) -> list[float]:
    """A number for all responses of each of the `scored` weights, in place of their accuracy."""
    scorer = score.Scorer(first, held_out, SEED)
    with mock.patch.object(task, "score", lambda text, answer: zlib.crc32(text.encode()) / 2**32):
        return [scorer.accuracy(weights) for weights in scored]


@pytest.mark.bench
def test_reloaded_weights_answer_as_those_of_a_fresh_engine(tmp_path: Path) -> None:
    chains.write_sets(tmp_path, seed=1000, num_train=1, num_held_out=8)
    for name, seed in (("a", 1), ("b", 2)):
        model.make(tmp_path / name, seed=seed)
    a, b = tmp_path / "a", tmp_path / "b"
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        first, second, again = processes.apply(fingerprints, (a, tmp_path / "held_out.jsonl", [a, b, a]))
        (fresh,) = processes.apply(fingerprints, (b, tmp_path / "held_out.jsonl", [b]))
    assert first == again != second
    assert second == fresh
