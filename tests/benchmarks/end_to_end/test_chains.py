"""Problems have the lengths of the regime, careful answers are right, and no set shares a problem with another."""

import json
import random
import statistics
from pathlib import Path

import pytest

from benchmarks.end_to_end import chains, model
from benchmarks.end_to_end.peers import task
from examples.arithmetic.make_model import make_tokenizer
from rollout.rewards.exact import compute_score
from tests.support.byte_tokenizer import tokenizer_in


def problems(count: int, seed: int = 1000) -> list[chains.Problem]:
    draw = random.Random(seed)
    return [chains.make_problem(draw) for _ in range(count)]


def total_by_hand(problem: chains.Problem) -> int:
    """The result, one addition after the other."""
    total = problem.first
    for _ in range(problem.rounds):
        for sign, digit in problem.program:
            total = (total + digit if sign == "+" else total - digit) % 20
    return total


def test_lengths_are_those_of_the_regime() -> None:
    lengths = [problem.num_tokens for problem in problems(8000)]
    assert 225 < statistics.fmean(lengths) < 275 and max(lengths) <= 2000
    assert 0.02 < statistics.fmean(length > 1000 for length in lengths) < 0.06


def test_careful_answers_are_right_and_repeat_no_line_and_quick_answers_err() -> None:
    draw, right = random.Random(1), {True: 0, False: 0}
    for problem in problems(400):
        assert problem.answer == total_by_hand(problem)
        for careful in (True, False):
            text = chains.write_answer(draw, problem, careful=careful)
            right[careful] += compute_score("", text, str(problem.answer), None)["score"] == 1.0
            if careful:
                signed = [
                    line.replace("plus", "+").replace("minus", "-").replace("is", "=") for line in text.split("\n")
                ]
                assert len(set(signed)) == len(signed)
    assert right[True] == 400 and 0.2 * 400 < right[False] < 0.6 * 400


def test_answers_have_the_tokens_that_problems_say(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, max_positions=model.CONTEXT)
    tokenizer = tokenizer_in(tmp_path)
    draw = random.Random(2)
    for problem in problems(50):
        answer, question = tokenizer.encode(
            [chains.write_answer(draw, problem, careful=True), problem.text], add_special_tokens=False
        )
        assert len(answer) + 1 == problem.num_tokens  # and the end of the text
        assert len(question) + 16 + problem.num_tokens <= model.CONTEXT and len(question) < 112


def test_sets_are_functions_of_the_seed_and_share_no_problem(tmp_path: Path) -> None:
    for name, seed in (("a", 1000), ("b", 1000), ("c", 1001)):
        chains.write_sets(tmp_path / name, seed=seed, num_train=48, num_held_out=96)
    texts = {
        (name, kind): [json.loads(line)["prompt"][0]["content"] for line in (tmp_path / name / kind).open()]
        for name in "abc"
        for kind in ("train.jsonl", "held_out.jsonl")
    }
    assert texts["a", "train.jsonl"] == texts["b", "train.jsonl"] != texts["c", "train.jsonl"]
    assert not set(texts["a", "train.jsonl"]) & set(texts["a", "held_out.jsonl"])
    before = [tmp_path / "a" / "train.jsonl", tmp_path / "a" / "held_out.jsonl"]
    chains.write_warm_start(tmp_path / "warm.jsonl", seed=1, count=3000, but_not=before)
    shown = {json.loads(line)["prompt"][0]["content"] for line in (tmp_path / "warm.jsonl").open()}
    assert len(shown) == 3000 and not shown & {text for path in before for text in texts["a", path.name]}


@pytest.mark.parametrize("text", ["answer: 7", "1 + 6 = 7\nanswer: 7", "answer: 7 ", "answer: 17", "7", "answer:", ""])
def test_peers_score_as_this_project_does(text: str) -> None:
    if "answer" in text:  # without the mark this project takes the last number, which no demonstration shows
        assert task.score(text, "7") == compute_score("", text, "7", None)["score"]
    assert task.score("answer: 3\nanswer: 7", "7") == 1.0
