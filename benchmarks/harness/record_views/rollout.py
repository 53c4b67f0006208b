"""Views of what engines do: decoding, sampling, single forwards."""

from benchmarks.harness.record_tables import Column, Table
from benchmarks.harness.record_views.view import UNRECORDED_WARM, View, milliseconds, percent

_RATE = Column(field="tokens_per_cpu_s", title="tokens per CPU second")


def _turns(history: str, title: str) -> Table:
    return Table(
        title=title, lines={"method": "method"}, where={"history": (history,)}, across="batch", columns=(_RATE,)
    )


ROLLOUT = View(
    question="How fast does a real engine decode with drafts of each method?",
    tables=(
        _turns("87 % reuse", "Tokens per CPU second by batch, history with 87 % reuse"),
        _turns("random history", "Tokens per CPU second by batch, useless history"),
        Table(
            title="The example's models, which sample for themselves, 64 requests",
            lines={"history": "model", "temperature": "temperature", "method": "method"},
            where={"history": ("warm start", "final policy")},
            columns=(
                _RATE,
                Column(field="tokens_per_row_forward", title="tokens per forward"),
                percent("accepted_share", "accepted"),
                Column(field="num_differing", title="greedy responses that differ", reduce="most"),
            ),
        ),
    ),
    notes=(
        "The goals compare methods turn by turn; the tables show medians over the turns, so their ratios differ.",
        "The rows were measured by several commands with `--resume`. Rows of that time name no commit: theirs is "
        "that of the first committed record that held them.",
        UNRECORDED_WARM,
    ),
)

SAMPLING = View(
    question="How long does sampling with log-probabilities take, by the product's sampler and by vLLM's?",
    tables=(
        Table(
            title="Milliseconds of a step",
            lines={"vocabulary": "vocabulary", "drafts": "draft tokens", "requests": "requests"},
            across="method",
            columns=(milliseconds("seconds", "time"),),
        ),
    ),
)

STEP_TIME = View(
    question="How long does an engine's forward take, by requests, tokens and weight format?",
    tables=(
        Table(
            title="Stock engine and the engine with drafts, ms a forward without draft tokens",
            lines={"engine": "engine", "format": "format"},
            where={"pattern": ("none",)},
            across="num_rows",
            columns=(milliseconds("seconds", "requests"),),
        ),
        Table(
            title="With draft tokens, medians over contexts and over uniform and ragged drafts, ms a forward",
            lines={"num_rows": "requests", "num_tokens": "tokens"},
            where={"pattern": ("uniform", "ragged")},
            across="format",
            columns=(milliseconds("seconds", "forward"),),
        ),
    ),
    notes=("FP8 is emulated on a CPU, so no speed can be read off its rows.",),
)
