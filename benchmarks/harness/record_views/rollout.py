"""Views of engines: decoding, sampling and single forwards."""

from collections.abc import Mapping, Sequence

from benchmarks.harness.record_answers import Answer, goal, median
from benchmarks.harness.record_tables import Column, Table, Value
from benchmarks.harness.record_views.view import UNRECORDED_WARM, View, milliseconds, percent

_RATE = Column(field="tokens_per_cpu_s", title="tokens per CPU second")


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


ROLLOUT = View(
    question="How fast does a real engine decode with the drafts of each method?",
    answer=Answer(
        text=(
            "With a useful history, the product's drafts make decoding {one} times as fast at batch 1, {eight} times "
            "at batch 8 and {many} times at batch 64."
        ),
        figures={
            "one": goal("ours over stock, batch 1, 87 % reuse"),
            "eight": goal("ours over stock, batch 8, 87 % reuse"),
            "many": goal("ours over stock, batch 64, 87 % reuse"),
        },
    ),
    tables=(
        _turns(
            "Tokens per CPU second by batch, responses with 87 % of their tokens copied from the history",
            "87 % reuse",
            "calibration",
        ),
        _turns("Tokens per CPU second by batch, responses independent of the history", "random history"),
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
        "The product samples faster than vLLM's sampler for drafts. Rows in which stock and peers have the product's "
        "sampler compare drafting alone. Settings of peers were chosen on prompts of their own (`calibration`).",
        "Rows without a sampler are older: stock and peers had vLLM's sampler and their default settings, and large "
        "batches fewer turns.",
        "A greedy sample of a trained model is a few forwards and a fraction of a second of CPU time, so single "
        "samples vary widely; its goal takes all samples together. Costs of a new prompt weigh eight times as much "
        "there as at temperature 1, where each prompt has eight responses.",
        "Several commands with `--resume` measured the rows. They did not record their commits: each row shows the "
        "commit of the first committed record that had it.",
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
