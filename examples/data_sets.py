"""The three sets of an example: distinct problems for training and evaluation, and rows of the warm start."""

import argparse
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar


class Problem(Protocol):
    """A problem that is known by its text."""

    @property
    def text(self) -> str:
        """The question."""
        ...


AnyProblem = TypeVar("AnyProblem", bound=Problem)
Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sets(Generic[AnyProblem]):
    """How an example makes its problems and rows."""

    make_problem: Callable[[random.Random], AnyProblem]
    prompt_row: Callable[[AnyProblem], Row]
    """A row for reinforcement learning and evaluation."""
    warm_start_row: Callable[[random.Random, AnyProblem], Row]
    """A row for the warm start."""

    def write(self, out: Path, *, seed: int, num_train: int, num_held_out: int, num_warm_start: int) -> None:
        """Write `train.jsonl`, `held_out.jsonl` and `warm_start.jsonl` into `out`; no problem occurs twice."""
        draw = random.Random(seed)
        taken: set[str] = set()
        held_out = self._problems(draw, num_held_out, taken)
        train = self._problems(draw, num_train, taken)
        warm_start = self._problems(draw, num_warm_start, taken)
        out.mkdir(parents=True, exist_ok=True)
        _write_jsonl(out / "held_out.jsonl", map(self.prompt_row, held_out))
        _write_jsonl(out / "train.jsonl", map(self.prompt_row, train))
        _write_jsonl(out / "warm_start.jsonl", [self.warm_start_row(draw, problem) for problem in warm_start])

    def _problems(self, draw: random.Random, count: int, taken: set[str]) -> list[AnyProblem]:
        """`count` problems whose texts are not in `taken`; adds the new texts to `taken`."""
        problems: list[AnyProblem] = []
        while len(problems) < count:
            problem = self.make_problem(draw)
            if problem.text not in taken:
                taken.add(problem.text)
                problems.append(problem)
        return problems


def _write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(
    sets: Sets[AnyProblem], argv: Sequence[str] | None, *, num_train: int, num_held_out: int, num_warm_start: int
) -> None:
    """The command line of an example's `make_data`; numbers are defaults."""
    parser = argparse.ArgumentParser(description="Make the data of an example.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=num_train, help="prompts for reinforcement learning")
    parser.add_argument("--held-out", type=int, default=num_held_out, help="problems that are only ever evaluated")
    parser.add_argument("--warm-start", type=int, default=num_warm_start, help="supervised rows")
    arguments = parser.parse_args(argv)
    sets.write(
        arguments.out,
        seed=arguments.seed,
        num_train=arguments.train,
        num_held_out=arguments.held_out,
        num_warm_start=arguments.warm_start,
    )
