"""Views of runs of the example: what is learned, with what switched on."""

from benchmarks.harness.record_tables import Column, Table
from benchmarks.harness.record_views.view import MIB, UNRECORDED_WARM, View, percent, spread

ABLATION = View(
    question="Does the example learn as well with INT8 weights, drafts and the planner, and how fast are its steps?",
    tables=(
        Table(
            title="Differences from BF16, synchronous, colocated; 95 % intervals over the seeds",
            lines={"arm": "arm"},
            where={"what": ("difference",)},
            columns=(
                Column(field="speed", title="speed, x"),
                Column(field="speed_low", title="low"),
                Column(field="speed_high", title="high"),
                Column(field="held_out_points", title="held-out, points"),
                Column(field="held_out_points_low", title="low"),
                Column(field="held_out_points_high", title="high"),
            ),
        ),
        Table(
            title="Runs, medians over the seeds",
            lines={"arm": "arm"},
            where={"what": ("run",)},
            columns=(
                Column(field="step_s", title="step, s"),
                Column(field="tokens_per_forward_later", title="tokens per forward after the first epoch"),
                Column(field="bubble", title="bubble"),
                Column(field="mean_staleness", title="mean staleness"),
                Column(field="k3_median", title="k3"),
                percent("held_out_before", "held-out before"),
                percent("held_out_after", "held-out after"),
            ),
        ),
    ),
    notes=(
        "Two engines and a trainer share two cores and rollouts are a small part of a step, so speed shows that "
        "nothing breaks, not what is gained.",
        UNRECORDED_WARM,
    ),
)

MISMATCH = View(
    question="What does each weight format cost in learning, with truncated importance sampling (TIS) and without?",
    tables=(
        Table(
            title="Runs, over the seeds",
            lines={"format": "format", "correction": "correction"},
            columns=(
                Column(field="k3_median", title="k3, median"),
                Column(field="ess_min", title="effective sample size, least", reduce="least"),
                Column(field="sqnr_db_min", title="worst-layer SQNR, dB", reduce="least"),
                percent("held_out_before", "held-out before"),
                *spread("held_out_after", "held-out after, %", scale=100.0),
            ),
        ),
    ),
    notes=(
        "`3 bits` is the positive control: INT8 codes of 3 bits must be seen to hurt without correction.",
        "An SQNR of 300 dB means lossless.",
        UNRECORDED_WARM,
    ),
)

QUICKSTART = View(
    question="How much does the example learn over seeds, and do two controls gain nothing?",
    tables=(
        Table(
            title="Cases",
            lines={"case": "case"},
            columns=(
                percent("held_out_before", "held-out before"),
                percent("held_out_after", "held-out after"),
                Column(field="points", title="gain, points"),
                Column(field="k3_median", title="k3, median"),
                Column(field="ess_min", title="effective sample size, least"),
                Column(field="step_s_median", title="step, s"),
                Column(field="seconds_all", title="all, s"),
                Column(field="peak_memory_bytes", title="peak memory, GiB", scale=1 / (1 << 30)),
            ),
        ),
        Table(
            title="Seconds by phase",
            lines={"case": "case"},
            columns=(
                Column(field="seconds_data", title="data"),
                Column(field="seconds_model", title="model"),
                Column(field="seconds_warm_start", title="warm start"),
                Column(field="seconds_rl", title="RL"),
                Column(field="seconds_report", title="report"),
            ),
        ),
    ),
)

SOAK = View(
    question="Do memory, file descriptors and shared memory stay flat over many steps?",
    tables=(
        Table(
            title="While stepping",
            lines={},
            columns=(
                *spread("memory_bytes", "memory, MiB", scale=MIB),
                *spread("num_fds", "descriptors"),
                Column(field="shm_bytes", title="shared memory, MiB", scale=MIB, reduce="most"),
                Column(field="num_processes", title="processes"),
            ),
        ),
    ),
)
