"""Views of publishes and of what changes from one to the next."""

from benchmarks.harness.record_tables import Column, Table
from benchmarks.harness.record_views.view import MIB, UNRECORDED_WARM, View, percent, spread

_CASE = {"trainer": "trainer", "engines": "engines", "transport": "transport"}


_TABLES = (
    Table(
        title="Seconds from the first scale to the last weight",
        lines=_CASE,
        where={"kind": ("publish",)},
        across="format",
        columns=(Column(field="timing_s/publish_deliver", title="s"),),
    ),
    Table(
        title="Seconds over those of the peer",
        lines=_CASE,
        where={"kind": ("peer",)},
        across="format",
        columns=(Column(field="ours_over_peer", title="x"),),
    ),
    Table(
        title="Seconds of the peer",
        lines=_CASE,
        where={"kind": ("peer",)},
        across="format",
        columns=(Column(field="deliver_s", title="s"),),
    ),
    Table(
        title="Parts of the peer's seconds",
        lines=_CASE,
        where={"kind": ("peer",)},
        columns=(
            Column(field="gather_s", title="gather"),
            Column(field="send_s", title="send"),
            Column(field="quantise_s", title="quantise"),
            Column(field="apply_s", title="apply"),
        ),
    ),
    Table(
        title="By format, over all cases",
        lines={"format": "format"},
        where={"kind": ("publish",)},
        columns=(
            *spread("timing_s/publish_probe", "proof, s"),
            Column(field="bytes_over_bf16", title="bytes over BF16"),
            Column(field="publish/sqnr_db_min", title="worst-layer SQNR, dB", reduce="least"),
            Column(field="publish/probe_gap_max", title="probe gap, nats", reduce="most"),
        ),
    ),
    Table(
        title="Bytes and memory of a rank",
        lines=_CASE,
        where={"kind": ("publish",)},
        columns=(
            Column(field="rank_bytes_over_own_shard", title="bytes over the own shard", reduce="most"),
            Column(field="peak_extra_bytes/trainer", title="trainer, most extra MiB", scale=MIB, reduce="most"),
            Column(field="peak_bound_bytes/trainer", title="bound", scale=MIB, reduce="most"),
            Column(field="peak_extra_bytes/engine", title="engine, most extra MiB", scale=MIB, reduce="most"),
            Column(field="peak_bound_bytes/engine", title="bound", scale=MIB, reduce="most"),
        ),
    ),
    Table(
        title="Deltas, where every 20th weight has changed",
        lines={**_CASE, "format": "format"},
        where={"kind": ("delta",)},
        columns=(
            percent("bytes_over_whole", "bytes of a whole publish"),
            Column(field="timing_s/publish_deliver", title="s"),
        ),
    ),
)

_PEER = (
    "Peer: BF16 weights gathered whole, sent whole to every engine rank, quantised there and loaded. Each part is "
    "measured by itself right after the product's publish."
)

_OLDER = (
    "Measured before three CPU-only optimisations were removed: another choice of INT8 kernel than vLLM's, an executor "
    "whose waiting ranks sleep, and an integer search for the largest magnitudes. "
    "CPU figures may be worse without them."
)

PUBLISH = View(
    question="How long does a publish take, against gathering, sending and quantising BF16 weights?",
    tables=_TABLES,
    notes=(_PEER, _OLDER),
)

PUBLISH_DELTA = View(
    question="Which share of the codes does an optimizer step change, and which share of a whole publish then travels?",
    tables=(
        Table(
            title="Medians of the steps after Adam has settled",
            lines={"format": "format", "learning_rate": "learning rate"},
            columns=(
                percent("changed_share", "codes that change"),
                percent("bytes_share", "bytes of a whole publish"),
                Column(field="whole_bytes", title="a whole publish, MiB", scale=MIB),
            ),
        ),
    ),
    notes=(
        "In a small INT8 model scales are a visible part of the bytes; they are float32 and move with the largest "
        "weight of their row. Scales of FP8 blocks are powers of two.",
        UNRECORDED_WARM,
    ),
)
