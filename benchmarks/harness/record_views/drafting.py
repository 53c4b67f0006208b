"""Views of what drafts: methods, trees, the history over epochs and inserts."""

from benchmarks.harness.record_tables import Column, Table
from benchmarks.harness.record_views.view import MIB, TOKENS, UNRECORDED_WARM, View, percent, spread

DRAFT_TREES = View(
    question="How many tokens would the engine emit per forward if it verified trees of drafts instead of chains?",
    tables=(
        Table(
            title="Generated traces",
            lines={
                "reuse": "reuse",
                "shape": "shape",
                "max_draft_tokens": "most draft tokens",
                "threshold": "threshold",
            },
            columns=(TOKENS, Column(field="verified_per_row", title="tokens verified beside each row's own")),
        ),
    ),
)

_GENERATED = {"case": ("recorded",)}

DRAFTING = View(
    question="How many tokens do drafts of each method bring per forward, and what do the drafts cost?",
    tables=(
        Table(
            title="Tokens per forward on responses of a run, by visit",
            lines={"method": "method"},
            where={"what": ("tokens",), "case": ("recorded",)},
            across="visit",
            columns=(TOKENS,),
        ),
        Table(
            title="Tokens per forward on generated traces, second epoch",
            lines={"case": "case"},
            where={"what": ("tokens",), "visit": (1,)},
            without=_GENERATED,
            across="method",
            columns=(TOKENS,),
        ),
        Table(
            title="Tokens per forward on generated traces, first epoch",
            lines={"case": "case"},
            where={"what": ("tokens",), "visit": (0,)},
            without=_GENERATED,
            across="method",
            columns=(TOKENS,),
        ),
        Table(
            title="Calibration error of the product's survival estimates",
            lines={"case": "case"},
            where={"what": ("tokens",), "method": ("ours",)},
            across="visit",
            columns=(Column(field="calibration_error", title="calibration error"),),
        ),
        Table(
            title="Oracles that always copy the right span",
            lines={"case": "case", "visit": "visit", "context": "equal tokens needed before the span"},
            where={"what": ("bound",)},
            columns=(TOKENS, Column(field="without_chance", title="without spans that are right by chance")),
        ),
        Table(
            title="Drafting, microseconds a request; methods take turns, so caches are cold",
            lines={"case": "case", "method": "method"},
            where={"what": ("propose",)},
            across="batch",
            columns=(Column(field="us_per_request", title="us"),),
        ),
        Table(
            title="Drafting of the product alone",
            lines={"case": "case", "batch": "batch"},
            where={"what": ("alone",)},
            across="threads",
            columns=(Column(field="ms_per_batch", title="ms a batch, threads"),),
        ),
        Table(
            title="Remembering a visit",
            lines={"case": "case", "method": "method"},
            where={"what": ("insert",)},
            columns=(
                Column(field="ns_per_token", title="ns a token"),
                Column(field="bytes_per_token", title="bytes a token"),
            ),
        ),
        Table(
            title="Attaching a segment",
            lines={},
            where={"what": ("attach",)},
            columns=(Column(field="bytes", title="MiB", scale=MIB), Column(field="ms", title="ms")),
        ),
        Table(
            title="Modelled speed over no drafts",
            lines={"case": "case", "method": "method"},
            where={"what": ("modelled",)},
            across="batch",
            columns=(Column(field="over_no_drafts", title="x, batch"),),
        ),
    ),
    notes=(
        "The run whose responses are replayed was made before `benchmarks.recorded_run` was committed; the command "
        "repeats its settings.",
    ),
)

HISTORY_EXAMPLE = View(
    question="Does the example learn the same with drafts from history, and how many tokens do they bring per forward?",
    tables=(
        Table(
            title="Epochs, medians over the seeds",
            lines={"drafts": "drafts", "epoch": "epoch"},
            columns=(
                Column(field="reward", title="reward"),
                Column(field="k3", title="k3"),
                *spread("tokens_per_forward", "tokens per forward"),
                percent("acceptance_rate", "accepted"),
                Column(field="calibration_error", title="calibration error"),
                percent("held_out_after", "held-out after the run"),
                Column(field="rollout_s", title="rollout, s"),
            ),
        ),
    ),
    notes=(UNRECORDED_WARM,),
)

HISTORY_SOAK = View(
    question="Does the history's memory stay flat, and are its tokens right, over very many inserts?",
    tables=(
        Table(
            title="The soak",
            lines={},
            columns=(
                Column(field="num_inserts", title="inserts"),
                Column(field="num_reads", title="reads"),
                Column(field="num_segments", title="segments"),
                Column(field="num_evictions", title="evictions"),
                Column(field="num_wrong_tokens", title="wrong tokens"),
                Column(field="growth", title="growth"),
                Column(field="seconds", title="seconds"),
            ),
        ),
    ),
)
