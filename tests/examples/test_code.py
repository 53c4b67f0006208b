"""The code example: its answers against the tests of its problems, and the configurations of its quickstart."""

import json
import random
from pathlib import Path

import pytest

from examples.arithmetic import make_model
from examples.arithmetic.quickstart import commands
from examples.code import make_data
from examples.code.quickstart import EXAMPLE, checks
from launcher.config.loading import load
from launcher.config.schema import RunConfig, SftConfig
from rollout.rewards.code import last_program

Row = dict[str, object]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Row]]:
    out = tmp_path_factory.mktemp("data")
    make_data.SETS.write(out, seed=0, num_train=300, num_held_out=100, num_warm_start=1000)
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in out.iterdir()}


def question(row: Row) -> str:
    messages = row["prompt"]
    assert isinstance(messages, list)
    return str(messages[0]["content"])


def passes(answer: str, tests: str) -> bool:
    """The example's own answers are no foreign code."""
    program = last_program(answer)
    assert program is not None
    names: dict[str, object] = {}
    exec(program, names)
    truth, function = json.loads(tests), names["f"]
    assert callable(function)
    return [function(*arguments) for arguments in truth["inputs"]] == truth["outputs"]


def test_statements_pass_the_tests_and_most_expressions_do_not() -> None:
    draw = random.Random(1)
    problems = [make_data.make_problem(draw) for _ in range(1000)]
    assert all(passes(make_data.write_statements(problem), problem.tests) for problem in problems)
    right = sum(passes(make_data.write_expression(problem), problem.tests) for problem in problems)
    assert 0.2 < right / 1000 < 0.45


def test_two_in_five_answers_of_the_warm_start_have_statements(sets: dict[str, list[Row]]) -> None:
    answers = [str(row["response"]) for row in sets["warm_start"]]
    assert 0.35 < sum("x = x" in answer for answer in answers) / len(answers) < 0.45


def test_held_out_problems_occur_in_no_other_set(sets: dict[str, list[Row]]) -> None:
    texts = [question(row) for rows in sets.values() for row in rows]
    assert len(texts) == len(set(texts))


def test_the_configurations_load_and_the_longest_problem_fits_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    phases = commands(tmp_path, seed=5, overrides=["num_steps=2"], example=EXAMPLE)
    run, sft = phases["rl"], phases["warm start"]
    config = load(RunConfig, run[3], run[4:])
    assert (config.seed, config.num_steps, config.reward.function) == (5, 2, "rollout.rewards.code.compute_score")
    assert config.model == load(SftConfig, sft[3], sft[4:]).output_dir == str(tmp_path / "warm")
    assert "examples.code.make_data" in phases["data"]
    make_model.make_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    problem = make_data.Problem(operations=(("+", 9),) * make_data.MAX_OPERATIONS)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem.text}], add_generation_prompt=True, return_dict=False
    )
    assert len(prompt) <= config.data.max_prompt_tokens
    assert len(tokenizer(make_data.write_statements(problem)).input_ids) < config.sampling.max_response_tokens


def test_a_machine_without_bubblewrap_is_named_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.code.quickstart.machine_checks", lambda work: [])
    monkeypatch.setattr("examples.code.quickstart.isolation_problem", lambda: "bubblewrap is missing")
    assert [(check.name, check.problem) for check in checks(tmp_path)] == [("sandbox", "bubblewrap is missing")]
