"""Views of runs of the example: learning with and without quantisation, drafts, the planner and corrections."""

from benchmarks.harness.example_run import K3_PARTS
from benchmarks.harness.record_answers import Answer, goal
from benchmarks.harness.record_tables import Column, Table
from benchmarks.harness.record_views.view import MIB, UNRECORDED_WARM, YES_OR_NO, View, percent, spread

OWN_WARM = "All runs start from the warm start that the benchmark makes with seed 1."

MISMATCH = View(
    question="How much held-out accuracy does each weight format lose, with and without truncated importance sampling?",
    answer=Answer(
        text=(
            "With TIS and 95 % confidence, accuracy ends below BF16's by at most {int8} points in INT8, {fp8_channel} "
            "in FP8 per channel and {fp8_block} in FP8 per block."
        ),
        figures={
            name: goal(f"{name} with TIS below bf16, held-out, upper end over seeds")
            for name in ("int8", "fp8_channel", "fp8_block")
        },
    ),
    tables=(
        Table(
            title="Runs by format and correction, over the seeds",
            lines={"format": "format", "correction": "correction"},
            columns=(
                Column(field="k3_median", title="k3, median"),
                Column(field="ess_min", title="effective sample size, least", reduce="least"),
                Column(field="sqnr_db_min", title="worst-layer SQNR, dB", reduce="least"),
                percent("held_out_before", "held-out accuracy before"),
                *spread("held_out_after", "held-out accuracy after, %", scale=100.0),
            ),
        ),
    ),
    notes=(
        "The correction is truncated importance sampling (TIS): `tis_token` applies it per token, `none` does not.",
        "`3 bits` is a positive control: INT8 codes rounded to 3 bits must hurt learning without correction.",
        "SQNR is the ratio of signal to quantisation noise; 300 dB means lossless.",
        UNRECORDED_WARM,
    ),
)

ALGORITHMS = View(
    question="Do PPO with a critic, and GRPO with a divergence as a cost, lift the example as GRPO does?",
    answer=Answer(
        text=(
            "GRPO gains {grpo} points in its worst seed. With 95 % confidence, PPO changes the mean gain by at least "
            "{ppo} points and the divergence by at least {kl}."
        ),
        figures={
            "grpo": goal("GRPO: gain, worst seed"),
            "ppo": goal("PPO with a critic: gain beside GRPO's, lower end over seeds"),
            "kl": goal("GRPO, divergence in the loss: gain beside GRPO's, lower end over seeds"),
        },
    ),
    tables=(
        Table(
            title="Runs by algorithm, over the seeds",
            lines={"case": "algorithm"},
            columns=(
                Column(field="num_steps", title="steps"),
                Column(field="k3_median", title="k3 of sampler and trainer, median"),
                percent("held_out_before", "held-out accuracy before"),
                *spread("held_out_after", "held-out accuracy after, %", scale=100.0),
                *spread("points", "gain, points"),
            ),
        ),
    ),
    notes=(
        "The critic learns alone in the first two steps of PPO, whose runs are longer by as many steps.",
        "PPO's divergence is k1 in the reward of tokens, GRPO's is k3 in the loss, each with the coefficient 0.001.",
        OWN_WARM,
    ),
)

GUARD = View(
    question="Does the guard alone bring back the accuracy that coarse codes cost, and is it quiet in a healthy run?",
    answer=Answer(
        text=(
            "With 95 % confidence, 3-bit codes cost at least {off} points without the guard and at most {act} with it; "
            "a healthy INT8 run has {actions} actions."
        ),
        figures={
            "off": goal("3 bits, off: below bf16, held-out, lower end over seeds"),
            "act": goal("3 bits, act: below bf16, held-out, upper end over seeds"),
            "actions": goal("actions in a healthy run"),
        },
    ),
    tables=(
        Table(
            title="Runs by case, over the seeds",
            lines={"case": "case"},
            columns=(
                Column(field="num_steps", title="steps"),
                Column(field="k3_median", title="k3, median"),
                Column(field="k3_last", title="k3, last step"),
                Column(field="actions", title="actions"),
                Column(field="engine_starts", title="starts of the engines"),
                Column(field="sample_s", title="sample for the causes, s a step"),
                Column(field="seconds", title="run, s"),
                percent("held_out_before", "held-out accuracy before"),
                *spread("held_out_after", "held-out accuracy after, %", scale=100.0),
            ),
        ),
        Table(
            title="k3 by cause, means over the steps; medians over the seeds",
            lines={"case": "case"},
            columns=tuple(Column(field=f"k3_{part}", title=part) for part in K3_PARTS),
        ),
    ),
    notes=(
        "`3 bits` is INT8 codes rounded to 3 bits. No run but the healthy one corrects by importance weights.",
        "`advise` says what `act` does, and changes nothing.",
        "The causes of k3 are explained in `docs/mismatch.md`; `interaction` is the product of the first two.",
        "The cost of the guard is the time of further starts of engines and trainer, and of steps with BF16 rollouts.",
        "Other work of low priority ran beside the runs, so their seconds are upper bounds.",
        OWN_WARM,
    ),
)

QUICKSTART = View(
    question="How much does the example learn over several seeds, and do two controls gain nothing?",
    answer=Answer(
        text=(
            "Held-out accuracy rises by {median} points in the median seed and {worst} in the worst; the controls "
            "change it by {zero} and {shuffled} points."
        ),
        figures={
            "median": goal("gain, median"),
            "worst": goal("gain, worst"),
            "zero": goal("gain with learning rate 0"),
            "shuffled": goal("gain with shuffled rewards"),
        },
    ),
    notes=(
        "The controls are a run with learning rate 0 and a run whose rewards are shuffled within each group.",
        "The column `total` covers all phases but not the installation of packages.",
    ),
    tables=(
        Table(
            title="Seeds and controls",
            lines={"case": "case"},
            columns=(
                percent("held_out_before", "held-out accuracy before"),
                percent("held_out_after", "held-out accuracy after"),
                Column(field="points", title="gain, points"),
                Column(field="k3_median", title="k3, median"),
                Column(field="ess_min", title="effective sample size, least"),
                Column(field="step_s_median", title="step, s"),
                Column(field="seconds_all", title="total, s"),
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
    answer=Answer(
        text=(
            "{verdict}: over {steps} steps, memory grows by {memory} %, file descriptors by {descriptors} % and shared "
            "memory by {shared} %."
        ),
        verdict=YES_OR_NO,
        figures={
            "steps": goal("steps"),
            "memory": goal("memory, growth", scale=100.0),
            "descriptors": goal("descriptors, growth", scale=100.0),
            "shared": goal("shared memory, growth", scale=100.0),
        },
    ),
    notes=(
        "Growth compares the median of the last quarter of the run with that of the second quarter.",
        "All processes of the run are counted together, every two seconds.",
    ),
    tables=(
        Table(
            title="Between the first and the last step",
            lines={},
            columns=(
                *spread("memory_bytes", "memory, MiB", scale=MIB),
                *spread("num_fds", "file descriptors"),
                Column(field="shm_bytes", title="shared memory, MiB", scale=MIB, reduce="most"),
                Column(field="num_processes", title="processes"),
            ),
        ),
    ),
)
