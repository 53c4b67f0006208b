"""Views of publishes: their time, bytes and memory, and the codes that change between two publishes."""

from benchmarks.harness.record_answers import Answer, first_of, goal, median
from benchmarks.harness.record_file import Record
from benchmarks.harness.record_notes import OLDER_GOALS, Note, has_rows, older_goals
from benchmarks.harness.record_tables import Column, Table
from benchmarks.harness.record_views.view import MIB, UNRECORDED_WARM, View, percent, spread

_PEERS = ("peer", "overlapped peer")
_CASE = {"trainer": "trainer", "engines": "engines", "transport": "transport"}


_TABLES = (
    Table(
        title="Seconds of a publish, from the first scale to the last loaded weight",
        lines=_CASE,
        where={"kind": ("publish",)},
        across="format",
        columns=(Column(field="timing_s/publish_deliver", title="s"),),
    ),
    Table(
        title="Seconds of a publish without the proof over the seconds of a peer",
        lines={"kind": "peer", **_CASE},
        where={"kind": _PEERS},
        across="format",
        columns=(Column(field="ours_over_peer", title="x"),),
    ),
    Table(
        title="Seconds of a peer",
        lines={"kind": "peer", **_CASE},
        where={"kind": _PEERS},
        across="format",
        columns=(Column(field="deliver_s", title="s"),),
    ),
    Table(
        title="Parts of a peer's seconds, and our seconds with the proof over them: medians over the formats",
        lines={"kind": "peer", **_CASE},
        where={"kind": _PEERS},
        columns=(
            Column(field="gather_s", title="gather"),
            Column(field="send_s", title="send"),
            Column(field="quantise_s", title="quantise"),
            Column(field="apply_s", title="apply"),
            Column(field="proven_over_peer", title="ours with the proof over it"),
            Column(field="proven_over_peer_high", title="highest upper end", reduce="most"),
        ),
    ),
    Table(
        title="By format, over all trainers, engines and transports",
        lines={"format": "format"},
        where={"kind": ("publish",)},
        columns=(
            *spread("timing_s/publish_probe", "after the last byte, s"),
            Column(field="proof_share", title="proof over a publish without it"),
            Column(field="proof_share_high", title="highest upper end", reduce="most"),
            Column(field="bytes_over_bf16", title="bytes over those in BF16"),
            Column(field="publish/sqnr_db_min", title="worst-layer SQNR, dB", reduce="least"),
            Column(field="publish/probe_gap_max", title="largest probe gap, nats", reduce="most"),
        ),
    ),
    Table(
        title="Bytes and memory per rank",
        lines=_CASE,
        where={"kind": ("publish",)},
        columns=(
            Column(field="rank_bytes_over_own_shard", title="bytes received over the rank's shard", reduce="most"),
            Column(field="peak_extra_bytes/trainer", title="trainer, peak extra MiB", scale=MIB, reduce="most"),
            Column(field="peak_bound_bytes/trainer", title="its bound, MiB", scale=MIB, reduce="most"),
            Column(field="peak_extra_bytes/engine", title="engine, peak extra MiB", scale=MIB, reduce="most"),
            Column(field="peak_bound_bytes/engine", title="its bound, MiB", scale=MIB, reduce="most"),
        ),
    ),
    Table(
        title="Deltas: publishes after every 20th weight has changed",
        lines={**_CASE, "format": "format"},
        where={"kind": ("delta",)},
        columns=(
            percent("bytes_over_whole", "bytes, share of a full publish"),
            Column(field="timing_s/publish_deliver", title="s"),
        ),
    ),
)

_PEER = (
    "The peer gathers the BF16 weights on one rank, sends all of them to every engine rank, quantises there and loads. "
    "Its parts are measured one by one, right after the product's publish."
)

_OVERLAPPED = Note(
    text=(
        "The overlapped peer gathers, sends, quantises and loads at the same time, over sockets and at the best of "
        "some bucket sizes."
    ),
    about=has_rows({"kind": ("overlapped peer",)}),
)

_ONE_BY_ONE = has_rows({"kind": ("publish",)}, lacks=("total_s",))
"""Whether the record has no whole publishes, with and without the proof, but their phases."""

_OLDER = Note(
    text=(
        "Measured before three CPU-only optimisations were removed: an INT8 kernel other than vLLM's choice, an "
        "executor whose waiting ranks sleep, and an integer search for the largest magnitudes. CPU figures may be "
        "worse without them."
    ),
    about=_ONE_BY_ONE,
)

_ADDED = Note(
    text=(
        "Rows have no time of a whole publish. The answer's figure with the proof is computed from their medians: the "
        "seconds until the last loaded weight plus those after it, over the seconds of the peer, in the worst case. No "
        "goal bounds it. Above 1, a proven publish takes longer than the peer's, which is not proven."
    ),
    about=_ONE_BY_ONE,
)


def _with_the_proof(record: Record) -> float:
    """Largest ratio of an 8-bit publish with its proof to the peer's, of rows that have only its phases."""

    def seconds(kind: str, *fields: str) -> dict[tuple[object, ...], float]:
        return {
            tuple(row[name] for name in (*_CASE, "format")): sum(float(row[field]) for field in fields)
            for row in record.rows
            if row["kind"] == kind and row["format"] != "bf16"
        }

    ours = seconds("publish", "timing_s/publish_deliver", "timing_s/publish_probe")
    return max(ours[case] / of_peer for case, of_peer in seconds("peer", "deliver_s").items())


_CASES = (
    "`2 x TP1` is two engines of one rank; `1 x TP2` is one engine of two ranks. The bound on memory is two buckets, "
    "the largest layer and, in shared memory, the staged bytes."
)

PUBLISH = View(
    question="How long does a publish take, compared with sending BF16 weights and quantising them in the engines?",
    answer=Answer(
        text=(
            "8-bit publishes take at most {bare} of the peer's time without the proof and {proven} with it; INT8 "
            "tensors with scales have {bytes} of their bytes in BF16."
        ),
        figures={
            "bare": first_of(goal("seconds without the proof over the peer's"), goal("seconds over the peer's")),
            "proven": first_of(goal("seconds with the proof over the peer's"), _with_the_proof),
            "bytes": median("bytes_over_bf16", {"kind": ("publish",), "format": ("int8",)}),
        },
    ),
    tables=_TABLES,
    notes=(
        _PEER,
        _OVERLAPPED,
        _CASES,
        _ADDED,
        _OLDER,
        older_goals(
            "`seconds over the peer's` leaves out the proof, which every publish of the product has. `bytes to a rank` "
            "are planned bytes.",
            "seconds over the peer's",
        ),
    ),
)

PUBLISH_DELTA = View(
    question=(
        "Which share of the codes does an optimizer step change, and which share of a full publish does a delta send?"
    ),
    answer=Answer(
        text=(
            "At learning rate 1e-6, a step changes {codes} % of INT8 codes and a delta sends {bytes} % of a full "
            "publish; FP8 per block: {block_codes} % and {block_bytes} %."
        ),
        figures={
            "codes": median("changed_share", {"format": ("int8",), "learning_rate": (1e-6,)}, scale=100.0),
            "bytes": median("bytes_share", {"format": ("int8",), "learning_rate": (1e-6,)}, scale=100.0),
            "block_codes": median("changed_share", {"format": ("fp8_block",), "learning_rate": (1e-6,)}, scale=100.0),
            "block_bytes": median("bytes_share", {"format": ("fp8_block",), "learning_rate": (1e-6,)}, scale=100.0),
        },
    ),
    tables=(
        Table(
            title="Medians over the steps from the 21st on, when Adam's moments have settled",
            lines={"format": "format", "learning_rate": "learning rate"},
            columns=(
                percent("changed_share", "codes that change"),
                percent("bytes_share", "bytes, share of a full publish"),
                Column(field="whole_bytes", title="full publish, MiB", scale=MIB),
            ),
        ),
    ),
    notes=(
        "In a small INT8 model, scales are a large part of the bytes. They are float32 and change with the largest "
        "weight of their row; scales of FP8 blocks are powers of two and change rarely.",
        UNRECORDED_WARM,
    ),
)

PUBLISH_OVER_NODES = View(
    question="How many bytes of a publish cross between nodes, measured at the interfaces of the nodes?",
    answer=Answer(
        text=(
            "For each node with engines, {apart_2} of a shard crosses on 2 nodes and {apart_4} on 4 if the trainer is "
            "elsewhere; {beside_2} and {beside_4} beside it."
        ),
        figures={
            f"{name}_{nodes}": median("ratio", {"mode": (mode,), "nodes": (nodes,)})
            for name, mode in (("apart", "disaggregated"), ("beside", "colocated"))
            for nodes in (2, 4)
        },
    ),
    tables=(
        Table(
            title="Bytes that all interfaces sent, headers included",
            lines={"mode": "mode", "nodes": "nodes", "nodes_with_takers": "nodes with engines", "engines": "engines"},
            columns=(
                Column(field="shard_bytes", title="shard, MiB", scale=MIB),
                Column(field="crossing_bytes", title="between nodes, MiB", scale=MIB),
                Column(field="ratio", title="over nodes with engines x shard"),
            ),
        ),
    ),
    notes=(
        "Nodes are network namespaces of one machine; gloo. Buckets hold random bytes, nothing is loaded.",
        "Of each bucket one copy must cross to every node with engines that does not hold it. Colocated, one node "
        "holds it, so the least is (nodes - 1) / nodes.",
        Note(
            text=f"{OLDER_GOALS} Colocated cases have the bound of the others; today's is 1.05 times the least.",
            about=lambda record: any(item.name.startswith("colocated") and item.bound >= 1 for item in record.goals),
        ),
    ),
)
