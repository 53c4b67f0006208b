"""Reading, tokenising and ordering prompts."""

import datetime
import decimal
import errno
import json
import math
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.data.order import OrderState, PromptOrder, PromptSet
from rollout.data.prompts import LoadedPrompts, PromptLoader
from rollout.data.rows import read_rows
from rollout.data.tokenizer import check_fits_model
from rollout.types import Prompt
from tests.support.byte_tokenizer import tokenizer_in, write_byte_tokenizer

ROWS = [
    {"prompt": "What is 1+1?", "answer": 2},
    {"prompt": [{"role": "user", "content": "Hi"}], "ground_truth": "hello", "data_source": "greetings"},
    {
        "prompt": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "2*3"}],
        "reward_model": {"style": "rule", "ground_truth": "6"},
        "extra_info": {"index": 7},
        "answer": "ignored",
    },
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(directory)
    return tokenizer_in(directory)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_of_every_column_shape_become_prompts(tmp_path, tokenizer):
    loaded = PromptLoader(tokenizer).load(write_jsonl(tmp_path / "mix.jsonl", ROWS), max_prompt_tokens=99)
    assert [p.prompt_id for p in loaded.prompts] == ["mix/0", "mix/1", "mix/2"]
    assert [p.ground_truth for p in loaded.prompts] == ["2", "hello", "6"]
    assert [p.data_source for p in loaded.prompts] == ["mix", "greetings", "mix"]
    assert [p.extra_info_json for p in loaded.prompts] == ["null", "null", '{"index": 7}']
    # One id a byte, one for each of <|role|>, <|end|> and the generation prompt.
    assert [len(p.token_ids) for p in loaded.prompts] == [12 + 3, 2 + 3, 8 + 3 + 5]
    assert loaded.prompts[0].token_ids.dtype == np.int32
    assert (loaded.num_dropped, loaded.num_truncated) == (0, 0)


def test_ids_equal_those_of_the_chat_template_itself(tmp_path, tokenizer):
    loaded = PromptLoader(tokenizer).load(write_jsonl(tmp_path / "a.jsonl", ROWS[1:]), max_prompt_tokens=99)
    for prompt, row in zip(loaded.prompts, ROWS[1:], strict=True):
        direct = tokenizer._hub.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        assert prompt.token_ids.tolist() == direct


def test_parquet_gives_the_same_rows_as_json_lines(tmp_path):
    path, columns = tmp_path / "rows.parquet", sorted({column for row in ROWS[1:] for column in row})
    table = pyarrow.table({column: [row.get(column) for row in ROWS[1:]] for column in columns})
    pyarrow.parquet.write_table(table, path)
    jsonl = read_rows(write_jsonl(tmp_path / "rows.jsonl", ROWS[1:]))
    for left, right in zip(read_rows(str(path)), jsonl, strict=True):
        assert (left.prompt, left.ground_truth, left.data_source) == (
            right.prompt,
            right.ground_truth,
            right.data_source,
        )
    assert read_rows(str(path))[1].where == f"{path}, row 2"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "x", ', "line 3: not valid JSON"),
        ('["x"]', "line 3: a row must be an object"),
        ('{"prompt": "x", "answer": NaN}', "line 3: the ground truth nan holds a number that is not finite"),
        ('{"prompt": "x", "answer": [1, Infinity]}', r"line 3: the ground truth \[1, inf\] holds a number"),
        ('{"question": "x", "answer": 1}', r"line 3: `prompt` None must be text .* the row has question, answer"),
        ('{"prompt": "", "answer": 1}', "line 3: `prompt` '' must be"),
        ('{"prompt": [{"role": "user"}], "answer": 1}', "line 3: chat message"),
        ('{"prompt": "x"}', "line 3: no ground truth"),
        ('{"prompt": "x", "answer": 1, "data_source": 5}', "line 3: `data_source` 5 must be text"),
    ],
)
def test_a_bad_row_is_refused_with_file_and_line(tmp_path, line, problem):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl, {problem}"):
        read_rows(str(path))


def test_answers_of_a_parquet_column_are_their_digits(tmp_path):
    path = tmp_path / "rows.parquet"
    answers = {
        "3.50": decimal.Decimal("3.50"),
        "7.00": decimal.Decimal("7.00"),
        "2024-02-29": datetime.date(2024, 2, 29),
        "2024-02-29 12:30:00": datetime.datetime(2024, 2, 29, 12, 30),
        "12:30:00": datetime.time(12, 30),
        "3.5": 3.5,
        "[1, 2]": [1, 2],
    }
    for text, answer in answers.items():
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x"], "answer": [answer]}), path)
        assert [row.ground_truth for row in read_rows(str(path))] == [text]
    large = pyarrow.array([decimal.Decimal("1E+2")], type=pyarrow.decimal128(5, -2))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x"], "answer": large.cast(pyarrow.decimal128(5, 0))}), path)
    assert read_rows(str(path))[0].ground_truth == "100"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (math.nan, "row 2: the ground truth nan holds a number that is not finite"),
        (math.inf, "row 2: the ground truth inf holds a number that is not finite"),
        (b"3", "row 2: the ground truth b'3' is bytes; write the column as text"),
    ],
)
def test_an_answer_that_is_no_value_is_refused_by_its_row(tmp_path, answer, problem):
    path = tmp_path / "bad.parquet"
    first = b"1" if isinstance(answer, bytes) else 1.0
    if isinstance(answer, float):
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x", "y"], "answer": [first, answer]}), path)
    else:
        column = {"prompt": ["x", "y"], "answer": ["1", None], "ground_truth": [None, answer]}
        pyarrow.parquet.write_table(pyarrow.table(column), path)
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_rows(str(path))


def test_the_name_of_a_data_set_stands_for_a_missing_source(tmp_path):
    path = write_jsonl(tmp_path / "mix.jsonl", ROWS[:2])
    assert [row.data_source for row in read_rows(path)] == ["mix", "greetings"]
    assert [row.data_source for row in read_rows(path, name="named")] == ["named", "greetings"]


def test_missing_empty_and_unknown_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_rows(str(tmp_path / "absent.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no rows"):
        read_rows(str(tmp_path / "empty.jsonl"))
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"\.jsonl or \.parquet"):
        read_rows(str(tmp_path / "rows.csv"))
    (tmp_path / "rows.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match="not a parquet file"):
        read_rows(str(tmp_path / "rows.parquet"))


def test_a_file_that_may_not_be_read_is_refused_with_the_reason(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)

    def refuse(*arguments):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    for called in ("open", "is_file"):  # itself, its folder
        monkeypatch.setattr(Path, called, refuse)
        with pytest.raises(ValueError, match=r"rows\.jsonl: cannot be read \(Permission denied\); make it readable"):
            read_rows(path)


def test_overlong_prompts_are_refused_dropped_or_truncated_from_the_left(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "long.jsonl", ROWS)

    def load(overlong):
        return PromptLoader(tokenizer).load(path, max_prompt_tokens=10, overlong=overlong)

    with pytest.raises(
        ValueError,
        match=r"long\.jsonl, line 1: prompt has 15 tokens.*2 of 3.*for training data, data\.overlong_prompts",
    ):
        load("refuse")
    dropped = load("drop")
    assert ([p.prompt_id for p in dropped.prompts], dropped.num_dropped) == (["long/1"], 2)
    truncated, whole = load("truncate"), PromptLoader(tokenizer).load(path, max_prompt_tokens=99)
    assert truncated.num_truncated == 2
    for short, full in zip(truncated.prompts, whole.prompts, strict=True):
        assert short.token_ids.tolist() == full.token_ids.tolist()[-10:]
    with pytest.raises(ValueError, match="all 3 prompts"):
        PromptLoader(tokenizer).load(path, max_prompt_tokens=2, overlong="drop")


def test_rows_beyond_the_limit_are_not_read(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\nnot json\n")
    assert len(read_rows(str(path), limit=1)) == 1


def test_without_a_chat_template_text_is_used_as_it_is_and_messages_are_refused(tmp_path):
    write_byte_tokenizer(tmp_path, chat_template=None)
    tokenizer = tokenizer_in(tmp_path)
    loaded = PromptLoader(tokenizer).load(write_jsonl(tmp_path / "a.jsonl", ROWS[:1]), max_prompt_tokens=99)
    assert len(loaded.prompts[0].token_ids) == 12
    with pytest.raises(ValueError, match=r"b\.jsonl, line 1: .*no chat template"):
        PromptLoader(tokenizer).load(write_jsonl(tmp_path / "b.jsonl", ROWS[1:]), max_prompt_tokens=99)


def test_a_conversation_that_the_template_refuses_is_named_by_line(tmp_path):
    write_byte_tokenizer(tmp_path, chat_template="{{ raise_exception('no system turns') }}")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: .*no system turns"):
        PromptLoader(tokenizer_in(tmp_path)).load(write_jsonl(tmp_path / "a.jsonl", ROWS[2:]), max_prompt_tokens=99)


TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
FAMILIES = {
    "Qwen": (TURNS + "<think>\n\n</think>\n\n", "<|im_start|> <|im_end|>", "<think> </think>"),
    "Llama 3": (
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
        "<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|end_header_id|> <|eot_id|>",
        "<|begin_of_text|> <|start_header_id|>",
    ),
    "Gemma": (
        "<bos>{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
        "<start_of_turn>model\n",
        "<start_of_turn> <end_of_turn>",
        "<bos> user",
    ),
    "DeepSeek": (
        "<｜begin▁of▁sentence｜><｜User｜>{{ messages[-1].content }}<｜Assistant｜><think>\n",
        "<｜User｜> <｜Assistant｜>",
        "<｜begin▁of▁sentence｜> <think>",
    ),
    "Mistral": ("<s>[INST] {{ messages[-1].content }}[/INST]", "[INST] [/INST]", "<s> </s>"),
    "Magistral": (
        "<s>[SYSTEM_PROMPT]In [THINK]...[/THINK].[/SYSTEM_PROMPT][INST]{{ messages[-1].content }}[/INST][THINK]",
        "[INST] [/INST]",
        "<s> [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [THINK] [/THINK]",
    ),
    "Llama 2": ("<s>[INST] {{ messages[-1].content }} [/INST]", "", "<s> </s>"),
}
"""Template, its markers next to a user's message, and other special tokens, by model."""
ORDINARY = (
    "Write <s>a</s> and <b>b</b>; think in <think>...</think> or [THINK], for the user, if x[i] < 1 | x[i] > 2\n\n."
)


@pytest.mark.parametrize(("template", "markers", "others"), FAMILIES.values(), ids=FAMILIES)
def test_a_prompt_that_is_already_rendered_is_refused_and_ordinary_text_is_not(tmp_path, template, markers, others):
    special = [*markers.split(), *others.split(), "\n", "\n\n"]
    write_byte_tokenizer(tmp_path, chat_template=template, more_special=special)
    loader, user = PromptLoader(tokenizer_in(tmp_path)), {"role": "user", "content": ORDINARY}

    def load(prompt):
        rows = [ROWS[0], {"prompt": prompt, "answer": "5"}]
        return loader.load(write_jsonl(tmp_path / "a.jsonl", rows), max_prompt_tokens=999).prompts[1].token_ids.tolist()

    direct = tokenizer_in(tmp_path)._hub.apply_chat_template([user], add_generation_prompt=True)["input_ids"]
    assert load(ORDINARY) == load([user]) == direct
    rendered = tokenizer_in(tmp_path).render([user])
    for marker in markers.split():
        for prompt in (rendered, [{"role": "user", "content": rendered}], f"2 + 3?{marker}"):
            with pytest.raises(
                ValueError, match=r"a\.jsonl, line 2: the prompt holds .* already rendered; give chat mes"
            ):
                load(prompt)


def test_rendered_text_is_right_without_a_chat_template(tmp_path):
    write_byte_tokenizer(tmp_path, chat_template=None)
    row = {"prompt": "<|user|>2 + 3?<|end|><|assistant|>", "answer": "5"}
    loaded = PromptLoader(tokenizer_in(tmp_path)).load(write_jsonl(tmp_path / "a.jsonl", [row]), max_prompt_tokens=99)
    assert loaded.prompts[0].token_ids.tolist()[-2:] == [256, 258]


@pytest.mark.parametrize("content", ["Let me see.\n<think>", ""])
def test_a_conversation_may_end_with_the_assistant_only_if_the_template_leaves_that_turn_open(tmp_path, content):
    row = {"prompt": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": content}], "answer": "5"}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    write_byte_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: the last message is the assistant's.* end with a user's"):
        PromptLoader(tokenizer_in(tmp_path)).load(path, max_prompt_tokens=99)
    left_open = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if not loop.last %}<|end|>{% endif %}{% endfor %}"
    )
    write_byte_tokenizer(tmp_path, chat_template=left_open)
    if content:
        (prompt,) = PromptLoader(tokenizer_in(tmp_path)).load(path, max_prompt_tokens=99).prompts
        assert tokenizer_in(tmp_path).decode(prompt.token_ids) == "2 + 3?" + content


repeats = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=2), st.sampled_from(["", "a", "a\0", "\ud800"]), st.sampled_from("ab")
    ),
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(rows=repeats)
def test_repeated_prompts_are_counted_by_tokens_ground_truth_and_source(rows):
    prompts = tuple(
        Prompt(
            prompt_id=f"a/{number}",
            data_source=source,
            token_ids=np.array(token_ids, dtype=np.int32),
            ground_truth=truth,
            extra_info_json=str(number),
        )
        for number, (token_ids, truth, source) in enumerate(rows)
    )
    loaded = LoadedPrompts(name="a", prompts=prompts, num_dropped=0, num_truncated=0)
    assert loaded.num_repeated() == len(rows) - len({(tuple(ids), truth, source) for ids, truth, source in rows})


def test_a_tokenizer_with_ids_beyond_the_model_is_refused(tmp_path):
    write_byte_tokenizer(tmp_path, model_vocab_size=258)
    with pytest.raises(ValueError, match="ids up to 259, but the model's vocab_size is 258"):
        check_fits_model(tokenizer_in(tmp_path).facts(), str(tmp_path))


def test_a_tokenizer_without_an_end_or_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot load a tokenizer"):
        tokenizer_in(tmp_path)
    write_byte_tokenizer(tmp_path, eos=False)
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        tokenizer_in(tmp_path).facts()


def test_the_fingerprint_changes_with_the_tokenizer(tmp_path, tokenizer):
    write_byte_tokenizer(tmp_path)
    assert tokenizer_in(tmp_path).facts() == tokenizer.facts()
    write_byte_tokenizer(tmp_path, chat_template="{{ messages[0].content }}")
    assert tokenizer_in(tmp_path).facts().fingerprint != tokenizer.facts().fingerprint


THINKS_BY_DEFAULT = (
    "{{ messages[0].content }}{% if enable_thinking is defined and enable_thinking is false %}<no>{% endif %}"
)


def test_the_chat_template_gets_its_arguments(tmp_path):
    write_byte_tokenizer(tmp_path, chat_template=THINKS_BY_DEFAULT)
    usual, quick = tokenizer_in(tmp_path), tokenizer_in(tmp_path, enable_thinking=False)
    assert [tokenizer.render(ROWS[1]["prompt"]) for tokenizer in (usual, quick)] == ["Hi", "Hi<no>"]
    assert usual.facts().fingerprint != quick.facts().fingerprint


@pytest.mark.parametrize("template", [THINKS_BY_DEFAULT, None])
def test_an_argument_that_the_template_does_not_read_is_refused(tmp_path, template):
    write_byte_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(ValueError, match=r"chat_template_arguments: .* does not read 'thinking'"):
        tokenizer_in(tmp_path, thinking=False)


@st.composite
def mixtures(draw):
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    weights = draw(st.lists(st.sampled_from([0.25, 1.0, 2.0, 5.0]), min_size=len(sizes), max_size=len(sizes)))
    return [
        PromptSet(prompt_ids=tuple(f"set{i}/{row}" for row in range(size)), weight=weight)
        for i, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]


@settings(max_examples=80, deadline=None)
@given(sets=mixtures(), seed=st.integers(0, 2**32), shuffle=st.booleans(), count=st.integers(0, 120))
def test_every_epoch_holds_every_prompt_once_and_shares_follow_the_weights(sets, seed, shuffle, count):
    draws = PromptOrder(sets, seed=seed, shuffle=shuffle).take(count)
    assert [draw.position for draw in draws] == list(range(count))
    total_weight = sum(prompts.weight for prompts in sets)
    for prompts in sets:
        members = set(prompts.prompt_ids)
        drawn = [draw for draw in draws if draw.prompt_id in members]
        assert abs(len(drawn) - count * prompts.weight / total_weight) <= len(sets)
        for epoch, size in Counter(draw.epoch for draw in drawn).items():
            in_epoch = [draw.prompt_id for draw in drawn if draw.epoch == epoch]
            assert len(set(in_epoch)) == size
            if epoch < drawn[-1].epoch:
                assert set(in_epoch) == members


@settings(max_examples=80, deadline=None)
@given(sets=mixtures(), seed=st.integers(0, 2**32), data=st.data())
def test_a_resumed_order_issues_the_unconsumed_prompts_in_order(sets, seed, data):
    order = PromptOrder(sets, seed=seed)
    consumed, in_flight = set(), []
    for _ in range(data.draw(st.integers(0, 6))):
        in_flight += order.take(data.draw(st.integers(0, 6)))
        finished = data.draw(st.lists(st.sampled_from(in_flight), unique=True)) if in_flight else []
        order.consume(draw.prompt_id for draw in finished)
        for prompt_id in [draw.prompt_id for draw in finished]:
            oldest = next(draw for draw in in_flight if draw.prompt_id == prompt_id)
            in_flight.remove(oldest)
            consumed.add(oldest.position)
    state = OrderState.from_json(json.loads(json.dumps(order.state().to_json())))
    assert state == order.state()
    resumed = PromptOrder(sets, seed=seed, state=state)
    whole = PromptOrder(sets, seed=seed).take(60)
    expected = [draw for draw in whole if draw.position not in consumed]
    assert resumed.take(len(expected)) == expected


@settings(max_examples=40, deadline=None)
@given(sets=mixtures(), seed=st.integers(0, 2**32), data=st.data())
def test_prompts_that_were_put_back_are_issued_again_before_all_others_also_after_a_resume(sets, seed, data):
    order = PromptOrder(sets, seed=seed)
    in_flight = order.take(data.draw(st.integers(1, 12)))
    following = PromptOrder(sets, seed=seed).take(len(in_flight) + 6)[len(in_flight) :]
    order.peek(data.draw(st.integers(0, 3)))
    chosen = [draw.prompt_id for draw in data.draw(st.lists(st.sampled_from(in_flight), unique=True))]
    left = []
    for prompt_id in chosen:
        left.append(next(draw for draw in reversed(in_flight) if draw.prompt_id == prompt_id))
        in_flight.remove(left[-1])
    order.put_back(chosen)
    order.consume(draw.prompt_id for draw in in_flight)
    resumed = PromptOrder(sets, seed=seed, state=order.state())
    expected = [*sorted(left, key=lambda draw: draw.position), *following]
    assert order.take(len(expected)) == expected == resumed.take(len(expected))
    with pytest.raises(ValueError, match="'never' was put back more often than issued"):
        order.put_back(["never"])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=12))
def test_peeking_shows_the_next_prompts_and_changes_nothing(calls):
    sets = [PromptSet(prompt_ids=tuple(f"a/{row}" for row in range(5)))]
    order, undisturbed = PromptOrder(sets, seed=3), PromptOrder(sets, seed=3)
    for look, count in calls:
        if look:
            seen = order.peek(count)
            assert order.peek(count) == seen
            assert order.take(count) == seen == undisturbed.take(count)
        else:
            assert order.take(count) == undisturbed.take(count)
    assert order.state() == undisturbed.state()


def test_every_seed_and_epoch_has_another_permutation():
    prompts = PromptSet(prompt_ids=tuple(f"a/{row}" for row in range(50)))
    first, second = PromptOrder([prompts], seed=1).take(100), PromptOrder([prompts], seed=2).take(50)
    assert [d.prompt_id for d in first[:50]] != [d.prompt_id for d in first[50:]]
    assert [d.prompt_id for d in first[:50]] != [d.prompt_id for d in second]


def test_a_dropped_row_leaves_the_order_of_the_others():
    ids = tuple(f"a/{row}" for row in range(20))
    whole = [d.prompt_id for d in PromptOrder([PromptSet(prompt_ids=ids)], seed=1).take(20)]
    rest = PromptOrder([PromptSet(prompt_ids=ids[:7] + ids[8:])], seed=1).take(19)
    assert [d.prompt_id for d in rest] == [prompt_id for prompt_id in whole if prompt_id != "a/7"]


def test_invalid_states_and_prompt_sets_are_refused():
    prompts = PromptSet(prompt_ids=("a/0", "a/1"))
    state = PromptOrder([prompts], seed=1).state()
    with pytest.raises(ValueError, match="other training prompts, weights, seed"):
        PromptOrder([prompts], seed=2, state=state)
    with pytest.raises(ValueError, match="'a/0' occurs twice"):
        PromptOrder([prompts, prompts], seed=1)
    with pytest.raises(ValueError, match="consumed more often than issued"):
        PromptOrder([prompts], seed=1).consume(["a/0"])
    with pytest.raises(ValueError, match="no data set"):
        PromptOrder([], seed=1)
    with pytest.raises(ValueError, match="not a saved state"):
        OrderState.from_json({"cursor": 1})
