"""Views of engines: decoding, sampling and single forwards."""

from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.harness.record_answers import Answer, Figure, goal, median
from benchmarks.harness.record_file import Record
from benchmarks.harness.record_notes import Note, all_of, has_goals, has_no_goals, has_rows, older_goals
from benchmarks.harness.record_tables import Column, Table, Value
from benchmarks.harness.record_views.view import UNRECORDED_WARM, View, milliseconds, percent

_RATE = Column(field="tokens_per_cpu_s", title="tokens per CPU second")
_USEFUL, _USELESS = "87 % reuse", "random history"
_LEAST_TURNS = 5
"""Fewest turns that have an interval."""


def _turns(title: str, *histories: str) -> Table:
    return Table(
        title=title,
        lines={
            "history": "prompts",
            "sampler": "sampler of stock and peers",
            "method": "method",
            "setting": "setting",
        },
        where={"history": histories},
        across="batch",
        columns=(_RATE,),
    )


_OLD_ROWS = has_rows({"history": (_USEFUL,)}, lacks=("sampler",))
"""Whether the record has rows of a form that names no sampler."""


def _turns_by_cell(record: Record) -> Counter[tuple[Value, Value, Value]]:
    """Number of turns by history, batch and sampler of stock and peers; rows without a sampler have vLLM's."""
    return Counter(
        (row["history"], row["batch"], row.get("sampler", "vLLM"))
        for row in record.rows
        if row["history"] in (_USEFUL, _USELESS) and row["method"] == "ours"
    )


def _turns_at(batch: int) -> Figure:
    """Number of turns of the goals without a named sampler, with a useful history."""
    return lambda record: _turns_by_cell(record)[_USEFUL, batch, "vLLM"]


def _few_turns(record: Record) -> bool:
    """Whether a bound of the record is of fewer turns than have an interval."""
    is_bounded = has_goals("lower 95 % bound")(record)
    return is_bounded and any(number < _LEAST_TURNS for number in _turns_by_cell(record).values())


ROLLOUT = View(
    question="How fast does a real engine decode with the drafts of each method?",
    answer=Answer(
        text=(
            "With a useful history, ours decodes {speed_1} times stock vLLM's speed at batch 1, {speed_8} at 8, "
            "{speed_64} at 64: lower 95 % bounds of {turns_1}, {turns_8} and {turns_64} turns."
        ),
        figures={
            **{
                f"speed_{batch}": goal(f"ours over stock, batch {batch}, 87 % reuse, lower 95 % bound")
                for batch in (1, 8, 64)
            },
            **{f"turns_{batch}": _turns_at(batch) for batch in (1, 8, 64)},
        },
    ),
    tables=(
        _turns(
            "Tokens per CPU second by batch, responses with 87 % of their tokens copied from the history",
            _USEFUL,
            "calibration",
        ),
        _turns("Tokens per CPU second by batch, responses independent of the history", _USELESS),
        Table(
            title="Number of turns by batch",
            lines={"history": "prompts", "sampler": "sampler of stock and peers", "method": "method"},
            where={"history": (_USEFUL, _USELESS)},
            across="batch",
            columns=(Column(field="tokens_per_cpu_s", title="turns", reduce="count"),),
        ),
        Table(
            title="Models of the example that sample their own responses, 64 requests",
            lines={
                "history": "model",
                "sampler": "sampler of stock and peers",
                "temperature": "temperature",
                "method": "method",
            },
            where={"history": ("warm start", "final policy")},
            columns=(
                _RATE,
                Column(field="tokens_per_row_forward", title="tokens per forward"),
                percent("accepted_share", "accepted draft tokens"),
                Column(field="num_differing", title="greedy responses that differ from stock", reduce="most"),
            ),
        ),
    ),
    notes=(
        "`ours` is the product's drafter, `stock` is vLLM without drafts, and the other methods are peers.",
        "In the first two tables, a model of random weights is forced to emit recorded responses. So all methods "
        "decode the same tokens.",
        "Goals compare the methods within each turn; tables show medians over the turns. So their ratios differ.",
        Note(
            text=(
                "A bound of fewer than five turns is no interval; that of one turn is the turn's ratio. The table of "
                "turns lists their numbers."
            ),
            about=_few_turns,
        ),
        Note(
            text=(
                "The product samples faster than vLLM's sampler for drafts. Rows in which stock and peers have the "
                "product's sampler compare drafting alone."
            ),
            about=has_rows({"sampler": ("product",)}),
        ),
        Note(
            text="Settings of peers were chosen on prompts of their own (`calibration`).",
            about=has_rows({"history": ("calibration",)}),
        ),
        Note(
            text=(
                "Rows without a sampler are older: stock and peers have vLLM's sampler, and no settings of peers were "
                "chosen. The product samples faster than vLLM's sampler for drafts, so ratios to peers are not of "
                "drafting alone."
            ),
            about=_OLD_ROWS,
        ),
        Note(
            text=(
                "A greedy sample of a trained model is a few forwards and a fraction of a second of CPU time, so "
                "single samples vary widely. Costs of a new prompt weigh eight times as much there as at temperature "
                "1, where each prompt has eight responses."
            ),
            about=has_rows({"temperature": (0.0,)}),
        ),
        Note(text="A goal of greedy speed takes all samples together.", about=has_goals("temperature 0")),
        Note(
            text="No goal bounds the speed of greedy samples; the table shows it.",
            about=all_of(has_rows({"temperature": (0.0,)}), has_no_goals("temperature 0")),
        ),
        Note(
            text=(
                "Several commands with `--resume` measured the rows. They did not record their commits: each row shows "
                "the commit of the first committed record that had it."
            ),
            about=_OLD_ROWS,
        ),
        older_goals(
            "Those without `lower 95 % bound` are medians over the turns.", "ours over stock, batch 1, 87 % reuse"
        ),
        UNRECORDED_WARM,
    ),
)

_LARGEST: Mapping[str, Sequence[Value]] = {"vocabulary": (151_936,), "requests": (64,), "drafts": ("none",)}

SAMPLING = View(
    question="How long does sampling with log-probabilities take, by the product's sampler and by vLLM's?",
    answer=Answer(
        text=(
            "For 64 requests without drafts and 151,936 token types, the product takes {ours} ms, vLLM's sampler for "
            "drafts {drafts} ms and its plain sampler {plain} ms."
        ),
        figures={
            name: median("seconds", {**_LARGEST, "method": (method,)}, scale=1e3)
            for name, method in (("ours", "ours"), ("drafts", "vllm"), ("plain", "vllm stock"))
        },
    ),
    notes=(
        "`ours` is the product's sampler, `vllm` vLLM's rejection sampler for drafts, and `vllm stock` vLLM's sampler "
        "of an engine without drafts.",
        "The column of draft tokens names the length of each request's draft. `one each, one of 16`: one request has a "
        "draft of 16 tokens, all others of one.",
    ),
    tables=(
        Table(
            title="Milliseconds to sample the tokens of one forward",
            lines={"vocabulary": "vocabulary, tokens", "drafts": "draft tokens", "requests": "requests"},
            across="method",
            columns=(milliseconds("seconds", "time"),),
        ),
    ),
)

STEP_TIME = View(
    question="How long does an engine's forward take, by requests, tokens and weight format?",
    answer=Answer(
        text=(
            "On this CPU, a forward of one request takes {bf16_one} ms in BF16 and {int8_one} ms in INT8; with 32 "
            "requests, {bf16_many} ms and {int8_many} ms."
        ),
        figures={
            f"{format}_{name}": median(
                "seconds", {"pattern": ("none",), "format": (format,), "num_rows": (requests,)}, scale=1e3
            )
            for format in ("bf16", "int8")
            for name, requests in (("one", 1), ("many", 32))
        },
    ),
    tables=(
        Table(
            title="Without draft tokens: ms per forward, by number of requests",
            lines={"engine": "engine", "format": "format"},
            where={"pattern": ("none",)},
            across="num_rows",
            columns=(milliseconds("seconds", "requests"),),
        ),
        Table(
            title="With draft tokens: ms per forward, by format; medians over contexts and draft shapes",
            lines={"num_rows": "requests", "num_tokens": "tokens verified"},
            where={"pattern": ("uniform", "ragged")},
            across="format",
            columns=(milliseconds("seconds", "forward"),),
        ),
    ),
    notes=(
        "`stock` is the engine without speculative decoding.",
        "A CPU emulates FP8, so the FP8 rows say nothing about the speed of FP8.",
    ),
)
