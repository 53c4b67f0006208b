import json
import random
import re
from pathlib import Path

import pytest

from examples.arithmetic import make_data, make_model, quickstart
from launcher.config.loading import load
from launcher.config.schema import RunConfig, SftConfig

Row = dict[str, object]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Row]]:
    out = tmp_path_factory.mktemp("data")
    make_data.SETS.write(out, seed=0, num_train=600, num_held_out=512, num_warm_start=2000)
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in out.iterdir()}


def question(row: Row) -> str:
    messages = row["prompt"]
    assert isinstance(messages, list)
    return str(messages[0]["content"])


def test_every_answer_is_what_the_question_evaluates_to(sets: dict[str, list[Row]]) -> None:
    for name in ("train", "held_out"):
        for row in sets[name]:
            assert re.fullmatch(r"\d( [+-] \d)+", question(row))
            assert eval(question(row)) == int(str(row["answer"]))


def test_every_worked_step_of_the_warm_start_is_right(sets: dict[str, list[Row]]) -> None:
    for row in sets["warm_start"]:
        *steps, last = str(row["response"]).splitlines()
        numbers = re.findall(r"[+-] \d", question(row))
        total = int(question(row)[0])
        if steps:
            assert len(steps) == len(numbers)
        for step, term in zip(steps, numbers, strict=False):
            total = eval(f"{total} {term}")
            assert step.split()[-1] == str(total)
        assert last == f"answer: {eval(question(row))}"


def test_running_totals_stay_in_bounds_and_chains_are_long_tailed() -> None:
    draw = random.Random(1)
    problems = [make_data.make_problem(draw) for _ in range(3000)]
    assert all(0 <= total <= make_data.MAX_TOTAL for problem in problems for total in problem.totals)
    counts = sorted(len(problem.terms) + 1 for problem in problems)
    assert (counts[0], counts[-1]) == (make_data.MIN_TERMS, make_data.MAX_TERMS)
    assert 5 <= counts[1500] <= 6
    assert counts[2850] >= 2 * counts[1500]


def test_held_out_problems_are_unique_and_occur_in_no_other_set(sets: dict[str, list[Row]]) -> None:
    texts = {name: [question(row) for row in rows] for name, rows in sets.items()}
    assert len(texts["held_out"]) >= 500
    together = [text for of_set in texts.values() for text in of_set]
    assert len(together) == len(set(together))


def test_about_half_of_the_warm_start_rows_show_every_step_in_several_wordings(sets: dict[str, list[Row]]) -> None:
    responses = [str(row["response"]) for row in sets["warm_start"]]
    worked = [text for text in responses if "\n" in text]
    assert 0.4 < len(worked) / len(responses) < 0.6
    first_words = {text.split()[0] if text.split()[0].isalpha() else "number" for text in worked}
    assert first_words == {"then", "plus", "minus", "number"}


def test_data_are_a_function_of_the_seed(tmp_path: Path) -> None:
    for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_data.SETS.write(tmp_path / folder, seed=seed, num_train=20, num_held_out=10, num_warm_start=30)
    texts = {
        folder: [(tmp_path / folder / f"{name}.jsonl").read_text() for name in ("train", "held_out", "warm_start")]
        for folder in "abc"
    }
    assert texts["a"] == texts["b"]
    assert all(one != other for one, other in zip(texts["a"], texts["c"], strict=True))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    make_model.main(["--out", str(out), "--seed", "0"])
    return out


def test_the_tokenizer_round_trips_ascii_text(model_dir: Path, sets: dict[str, list[Row]]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    every_character = "".join(map(chr, range(32, 127)))
    texts = [every_character, "\n\n  a\n", "7 + 123 = x", *(str(row["response"]) for row in sets["warm_start"][:200])]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids


def test_numbers_and_words_are_single_tokens_and_the_vocabulary_is_full(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert len(tokenizer) == make_model.VOCAB_SIZE == len(set(make_model.vocabulary()))
    pieces = tokenizer.convert_ids_to_tokens(
        tokenizer("12 plus 7 is 19\nanswer: 19", add_special_tokens=False).input_ids
    )
    assert pieces == ["12", " plus", " 7", " is", " 19", "\n", "answer:", " 19"]


def test_the_chat_template_opens_the_assistants_turn_and_its_end_is_the_end_of_sequence(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 2"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\n1 + 2<|im_end|>\n<|im_start|>assistant\n"
    config = json.loads((model_dir / "config.json").read_text())
    assert tokenizer.eos_token_id == config["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_every_sharded_dimension_is_a_multiple_of_128_on_two_ranks(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    heads, kv_heads, head = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    sharded = [heads * head, kv_heads * head, config["intermediate_size"], config["vocab_size"]]
    assert [size // 2 % 128 for size in sharded] == [0, 0, 0, 0]
    assert config["hidden_size"] % 128 == 0


def test_the_model_is_a_function_of_the_seed(model_dir: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        make_model.make_model(tmp_path / str(seed), seed=seed)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (model_dir, tmp_path / "0", tmp_path / "1")]
    assert weights[0] == weights[1] != weights[2]


def test_the_configurations_load_with_the_quickstarts_own_overrides(tmp_path: Path) -> None:
    commands = quickstart.commands(tmp_path, seed=5, overrides=["num_steps=2"])
    run, sft = commands["rl"], commands["warm start"]
    config = load(RunConfig, run[3], run[4:])
    assert (config.seed, config.num_steps, config.engine.format) == (5, 2, "int8")
    assert config.trainer.parallel.tensor == 2
    assert config.model == load(SftConfig, sft[3], sft[4:]).output_dir == str(tmp_path / "warm")


def test_longest_problems_fit_the_configured_lengths(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    config = load(RunConfig, quickstart.EXAMPLE / "rl.yaml")
    terms = tuple(("+" if index % 2 else "-", 9) for index in range(make_data.MAX_TERMS - 1))
    problem = make_data.Problem(first=9, terms=terms)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem.text}], add_generation_prompt=True, return_dict=False
    )
    assert len(prompt) <= config.data.max_prompt_tokens
    answers = [make_data.write_steps(random.Random(seed), problem) for seed in range(50)]
    assert max(len(tokenizer(text).input_ids) for text in answers) + 1 <= config.sampling.max_response_tokens


def test_accuracy_is_read_from_the_bf16_rows_of_the_whole_held_out_set(tmp_path: Path) -> None:
    rows = [
        {"set_name": "held_out", "data_source": "all", "format": weight_format, "step": step, "average": average}
        for weight_format, step, average in (("int8", 0, 0.1), ("bf16", 20, 0.8), ("bf16", 0, 0.4), ("int8", 20, 0.7))
    ]
    (tmp_path / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert quickstart.held_out_accuracy(tmp_path) == (0.4, 0.8)


def test_both_stages_are_checked_before_the_warm_start(example: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seconds = quickstart.run_dry(example, quickstart.commands(example, 0, []))
    lines = capfd.readouterr().out.splitlines()
    assert [line.split("  ")[1].strip() for line in lines if "passes every check" in line] == ["warm start", "rl"]
    assert lines[-1] == f"-- dry runs: {seconds:.1f} s" and seconds < 30


def test_the_message_of_a_refused_phase_is_shown(example: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(quickstart.PhaseFailedError, match="dry run of rl") as failed:
        quickstart.run_dry(example, quickstart.commands(example, 0, ["num_steps=0"]))
    assert failed.value.code == 2
    shown = capfd.readouterr()
    assert "`num_steps` = 0: input should be greater than 0" in shown.err
    assert "Traceback" not in shown.err


def test_an_unfit_machine_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launcher.checks.preflight.MIN_MEMORY_BYTES", 1 << 50)
    monkeypatch.setattr("launcher.checks.preflight.SELF_TEST", ("-c", "print('INT8: exact')"))
    assert quickstart.main(["--work", str(tmp_path / "work")]) == 2
    assert "quickstart: memory: " in capsys.readouterr().err
    assert not (tmp_path / "work").exists()
