"""Views of drafting: methods, trees of drafts, the history over epochs and under many inserts."""

from collections.abc import Mapping, Sequence

from benchmarks.harness.record_answers import Answer, goal, largest_median, median
from benchmarks.harness.record_tables import Column, Table, Value
from benchmarks.harness.record_views.view import MIB, TOKENS, UNRECORDED_WARM, YES_OR_NO, View, percent, spread

DRAFT_TREES = View(
    question="How many tokens would the engine emit per forward if it verified trees of drafts instead of chains?",
    answer=Answer(
        text=(
            "At 87 % reuse, trees reach {tree} tokens per forward, chains of at most 16 tokens {chain}, and chains of "
            "at most 32 tokens {long_chain}."
        ),
        figures={
            "tree": median("tokens_per_forward", {"reuse": (0.87,), "shape": ("tree",)}),
            "chain": median(
                "tokens_per_forward",
                {"reuse": (0.87,), "shape": ("chain",), "max_draft_tokens": (16,), "threshold": (0.1,)},
            ),
            "long_chain": median(
                "tokens_per_forward",
                {"reuse": (0.87,), "shape": ("chain",), "max_draft_tokens": (32,), "threshold": (0.03,)},
            ),
        },
    ),
    notes=(
        "A chain is one draft per request, as vLLM verifies it. A tree holds all drafts that the drafter considers; "
        "the engine would keep the longest correct one.",
        "`reuse` is the share of a response's tokens that is copied from the history. `threshold` is the estimated "
        "survival below which a chain ends.",
    ),
    tables=(
        Table(
            title="Second epoch of generated responses",
            lines={
                "reuse": "reuse",
                "shape": "shape",
                "max_draft_tokens": "largest draft, tokens",
                "threshold": "threshold",
            },
            columns=(TOKENS, Column(field="verified_per_row", title="draft tokens verified per request and forward")),
        ),
    ),
)

_GENERATED = {"case": ("recorded",)}
_JUDGED: Mapping[str, Sequence[Value]] = {"what": ("tokens",), "case": ("2k, reuse 87 %",), "visit": (1,)}

DRAFTING = View(
    question="How many tokens per forward does each drafting method reach, and how much time does drafting take?",
    answer=Answer(
        text=(
            "At 87 % reuse, the product reaches {tokens} tokens per forward, Arctic at its best setting {arctic}; "
            "drafting for 256 requests of 16k tokens takes {ms} ms."
        ),
        figures={
            "tokens": median("tokens_per_forward", {**_JUDGED, "method": ("ours",)}),
            "arctic": largest_median("tokens_per_forward", _JUDGED, by="method", begins="Arctic"),
            "ms": median(
                "ms_per_batch",
                {"what": ("propose",), "case": ("16k, reuse 87 %",), "method": ("ours",), "batch": (256,)},
            ),
        },
    ),
    tables=(
        Table(
            title="Tokens per forward on the responses of a recorded run, by visit of the prompt",
            lines={"method": "method"},
            where={"what": ("tokens",), "case": ("recorded",)},
            across="visit",
            columns=(TOKENS,),
        ),
        Table(
            title="Tokens per forward on generated responses, second epoch",
            lines={"case": "case"},
            where={"what": ("tokens",), "visit": (1,)},
            without=_GENERATED,
            across="method",
            columns=(TOKENS,),
        ),
        Table(
            title="Tokens per forward on generated responses, first epoch",
            lines={"case": "case"},
            where={"what": ("tokens",), "visit": (0,)},
            without=_GENERATED,
            across="method",
            columns=(TOKENS,),
        ),
        Table(
            title="Calibration error of the product's survival estimates, by visit",
            lines={"case": "case"},
            where={"what": ("tokens",), "method": ("ours",)},
            across="visit",
            columns=(Column(field="calibration_error", title="calibration error"),),
        ),
        Table(
            title="Upper bound: tokens per forward of an oracle that always copies the right span",
            lines={"case": "case", "visit": "visit", "context": "tokens that must match before the span"},
            where={"what": ("bound",)},
            columns=(TOKENS, Column(field="without_chance", title="without spans of one or two tokens")),
        ),
        Table(
            title="Drafting time in microseconds per request, by batch; methods alternate, so caches are cold",
            lines={"case": "case", "method": "method"},
            where={"what": ("propose",)},
            across="batch",
            columns=(Column(field="us_per_request", title="microseconds"),),
        ),
        Table(
            title="Drafting time of the product alone in ms per batch, by threads",
            lines={"case": "case", "batch": "batch"},
            where={"what": ("alone",)},
            across="threads",
            columns=(Column(field="ms_per_batch", title="ms per batch"),),
        ),
        Table(
            title="Adding a visit to the history",
            lines={"case": "case", "method": "method"},
            where={"what": ("insert",)},
            columns=(
                Column(field="ns_per_token", title="ns per token"),
                Column(field="bytes_per_token", title="bytes per token"),
            ),
        ),
        Table(
            title="Attaching one large segment",
            lines={},
            where={"what": ("attach",)},
            columns=(Column(field="bytes", title="MiB", scale=MIB), Column(field="ms", title="ms")),
        ),
        Table(
            title="Modelled speed over an engine without drafts, by batch",
            lines={"case": "case", "method": "method"},
            where={"what": ("modelled",)},
            across="batch",
            columns=(Column(field="over_no_drafts", title="speed"),),
        ),
    ),
    notes=(
        "`ours` is the product's drafter. A case names the length of its responses, 2k or 16k tokens, and their "
        "reuse: the share of tokens that is copied from the history.",
        "Generated responses are edited copies of an old response, unless their case names another model.",
        "In cases with `phrases`, responses are phrases of an outline instead of edited copies.",
        "Cells are medians over seeds; goals with an end take the worse end of the 95 % interval over seeds.",
        "`Arctic, best setting` is the setting with the most tokens per forward on a seed of its own (`choice of "
        "settings`). Such settings draft very freely. The row `ours, threshold 0` does so, too, and is compared with "
        "them.",
        "In rows of modelled speed, all methods draft up to 32 tokens. In other rows drafts have up to 16, those of "
        "HistoSpec's paper 32 and those of Arctic with vLLM's defaults 24.",
        "Modelled speed is not measured: a formula gives the time of a forward, see the list above.",
        "An oracle's span of one or two tokens may be right by chance; the second column leaves such spans out.",
    ),
)

HISTORY_EXAMPLE = View(
    question="Does the example learn the same with drafts from history, and how many tokens per forward do they bring?",
    answer=Answer(
        text=(
            "{verdict}: with 95 % confidence, drafts cost at most {reward} points of reward; later epochs reach at "
            "least {tokens} tokens per forward."
        ),
        verdict=YES_OR_NO,
        figures={
            "reward": goal("reward: drafts below none, upper end over seeds"),
            "tokens": goal("tokens per forward after epoch 0"),
        },
    ),
    tables=(
        Table(
            title="By epoch, medians over the seeds",
            lines={"drafts": "drafts", "epoch": "epoch"},
            columns=(
                Column(field="reward", title="reward"),
                Column(field="k3", title="k3"),
                *spread("tokens_per_forward", "tokens per forward"),
                percent("acceptance_rate", "accepted draft tokens"),
                Column(field="calibration_error", title="calibration error"),
                percent("held_out_after", "held-out accuracy after the run"),
                Column(field="rollout_s", title="rollout, s"),
            ),
        ),
    ),
    notes=("Without drafts an engine emits one token per forward.", UNRECORDED_WARM),
)

HISTORY_SOAK = View(
    question="Does the history's memory stay flat, and are its tokens right, over very many inserts?",
    answer=Answer(
        text=(
            "{verdict}: {inserts} inserted responses left {wrong} wrong tokens, and memory grew by {growth} % of the "
            "inserted bytes."
        ),
        verdict=YES_OR_NO,
        figures={
            "inserts": goal("inserts"),
            "wrong": goal("wrong tokens"),
            "growth": goal("growth after a third", scale=100.0),
        },
    ),
    notes=(
        "Writer threads insert responses, reader threads fetch them and compare every token; the byte budget forces "
        "evictions all the time.",
        "Growth is the change of resident memory after the first third of the inserts, over the bytes inserted since.",
    ),
    tables=(
        Table(
            title="Counts of the run",
            lines={},
            columns=(
                Column(field="num_inserts", title="inserted responses"),
                Column(field="num_reads", title="responses read"),
                Column(field="num_segments", title="segments published and read"),
                Column(field="num_evictions", title="evicted prompts"),
                Column(field="num_wrong_tokens", title="wrong tokens"),
                Column(field="growth", title="growth"),
                Column(field="seconds", title="seconds"),
            ),
        ),
    ),
)
