"""Views of schedules, simulated and real, and of packing."""

from collections.abc import Mapping, Sequence

from benchmarks.harness.record_answers import Answer, goal, largest
from benchmarks.harness.record_notes import Note
from benchmarks.harness.record_tables import Column, Table, Value
from benchmarks.harness.record_views.view import View, milliseconds, spread

_SCHEDULE: Mapping[str, Sequence[Value]] = {"what": ("schedule",), "drafts": ("none",), "trainer_gpus": (0,)}

_STEP = Column(field="step_s", title="step, s")

_SCHEDULE_COLUMNS = (
    _STEP,
    Column(field="bubble", title="bubble"),
    Column(field="idle", title="idle"),
    Column(field="mean_staleness", title="mean staleness"),
    Column(field="max_staleness", title="largest staleness", reduce="most"),
    Column(field="moved_groups", title="moved groups"),
)

PLANNER = View(
    question=(
        "How long is a step under each planner policy, how stale are its samples, and how long does planning take?"
    ),
    answer=Answer(
        text=(
            "In simulation, `adaptive, overlap 1` (staleness {one}) is {overlap} times as fast as `static` and "
            "`flexible` (staleness {three}) {flexible} times; planning 65,536 responses takes at most {ms} ms."
        ),
        figures={
            "one": largest("max_staleness", {"scheme": ("adaptive, overlap 1",)}),
            "overlap": goal("adaptive, overlap 1 (staleness up to 1) over static, groups at 0.71"),
            "three": largest("max_staleness", {"scheme": ("flexible",)}),
            "flexible": goal("flexible (staleness up to 3) over static, groups at 0.71"),
            "ms": goal("planning 65,536 responses, slowest policy"),
        },
    ),
    tables=(
        Table(
            title="64 engines, forecasts per prompt (rank correlation with the lengths 0.71)",
            lines={"scheme": "scheme"},
            where={**_SCHEDULE, "engines": (64,), "forecasts": ("groups",), "correlation": (0.6,)},
            columns=_SCHEDULE_COLUMNS,
        ),
        Table(
            title="64 engines, forecasts per response (rank correlation 0.9)",
            lines={"scheme": "scheme"},
            where={**_SCHEDULE, "engines": (64,), "forecasts": ("responses",), "correlation": (0.9,)},
            columns=_SCHEDULE_COLUMNS,
        ),
        Table(
            title="64 engines: seconds per step, by the correlation of the forecasts",
            lines={"scheme": "scheme", "forecasts": "forecasts"},
            where={**_SCHEDULE, "engines": (64,)},
            across="correlation",
            columns=(_STEP,),
        ),
        Table(
            title="64 engines: seconds per step, by drafting method",
            lines={"scheme": "scheme", "forecasts": "forecasts"},
            where={"what": ("schedule",), "engines": (64,), "correlation": (0.6, 0.9), "trainer_gpus": (0,)},
            without={"forecasts": ("exact",)},
            across="drafts",
            columns=(_STEP,),
        ),
        Table(
            title="Seconds per step by number of engines, forecasts per prompt",
            lines={"scheme": "scheme"},
            where={**_SCHEDULE, "forecasts": ("groups",), "correlation": (0.6,)},
            across="engines",
            columns=(_STEP,),
        ),
        Table(
            title="96 GPUs, shared or divided between engines and trainer",
            lines={
                "engines": "engines",
                "trainer_gpus": "GPUs of the trainer",
                "colocated": "colocated",
                "scheme": "scheme",
            },
            where={"what": ("schedule",)},
            without={"trainer_gpus": (0,)},
            columns=(
                _STEP,
                Column(field="bubble", title="bubble"),
                Column(field="mean_staleness", title="mean staleness"),
            ),
        ),
        Table(
            title="Milliseconds to plan a step, by number of responses",
            lines={"scheme": "scheme"},
            where={"what": ("planning",)},
            across="responses",
            columns=(Column(field="ms", title="ms"),),
        ),
    ),
    notes=(
        "Engines and trainer are simulated; policies, admission and dispatcher are the product's. Response lengths are "
        "lognormal, with 128 requests per engine and step.",
        "`static` is the baseline: every step waits for its own responses, nothing overlaps, and no sample is stale. "
        "Speeds in the goals are relative to it, without drafts, unless a goal names another stack.",
        "`groups` are forecasts per prompt, `responses` forecasts per response, and `exact` the true mean of each "
        "group. For `groups` and `exact`, the correlation column is the prompts' share of the variance of log-lengths.",
        "With `drafts`, tokens per forward come from the [drafting record](drafting.md). Training takes as long as "
        "without drafts.",
    ),
)


def _makespans(lengths: str) -> Table:
    return Table(
        title=f"Response lengths that are {lengths}, over the repeats",
        lines={"scheme": "scheme"},
        where={"lengths": (lengths,)},
        columns=(
            *spread("makespan_s", "real makespan, s"),
            Column(field="simulated_s", title="simulated makespan, s"),
            Column(field="saturated_s", title="full engines of the fitted speed, s"),
            *spread("simulated_over_real", "simulated over real makespan"),
            Column(field="idle", title="real idle share"),
            Column(field="simulated_idle", title="simulated idle share"),
        ),
    )


PLANNER_ENGINES = View(
    question="Does the simulator of the planner's benchmark agree with two real engines under the same schedules?",
    answer=Answer(
        text=(
            "{verdict}: in the median of the worst scheme, the simulated makespan is off by {recorded} % on recorded "
            "lengths and {drawn} % on drawn lengths."
        ),
        verdict=("Within its bounds", "Not within all bounds"),
        figures={
            lengths: goal(f"makespan, {lengths} lengths: simulated against real, worst scheme's median", scale=100.0)
            for lengths in ("recorded", "drawn")
        },
    ),
    tables=(_makespans("recorded"), _makespans("drawn")),
    notes=(
        "Makespan is the time from the first admission to the end of the last training step.",
        "`recorded` lengths come from a run; `drawn` lengths are lognormal.",
        "Full engines of the fitted speed bound every simulated schedule. They do not bound the real engines, which "
        "can be faster than the fitted speed. The simulator overestimates time where responses are longer than those "
        "that its speeds were fitted to.",
        Note(
            text="In some rows the real makespan of `flexible` is shorter than full engines of the fitted speed allow.",
            about=lambda record: any(
                float(row["makespan_s"]) < float(row["saturated_s"])
                for row in record.rows
                if row["scheme"] == "flexible"
            ),
        ),
    ),
)

_LARGE = "65,536 samples on 512 ranks, at most 33,792 tokens a micro batch"
_SHAPE = {"samples": "samples", "ranks": "ranks"}

PACKING = View(
    question="How evenly are samples assigned to ranks and packed into micro batches, and how long does packing take?",
    answer=Answer(
        text=(
            "65,536 samples on 512 ranks are packed in {ms} ms; micro batches are {fill} % full, and the slowest rank "
            "exceeds the mean by {imbalance} %."
        ),
        figures={
            "ms": goal(f"{_LARGE}: median duration"),
            "fill": goal(f"{_LARGE}: fill", scale=100.0),
            "imbalance": goal(f"{_LARGE}: costliest rank over the mean, minus 1", scale=100.0),
        },
    ),
    notes=(
        "`ours` is the product. `verl` is verl's own balancing; both are compared by verl's cost model.",
        "Fill is the share of the token bound that micro batches use.",
        "No assignment can fall below the lower bound. 1F1B is the schedule one forward, one backward.",
    ),
    tables=(
        Table(
            title="Assignment of samples to ranks, one micro batch per rank",
            lines={**_SHAPE, "method": "method"},
            where={"kind": ("ranks",)},
            columns=(
                milliseconds("seconds", "time"),
                Column(field="imbalance", title="slowest rank over the mean, minus 1"),
                Column(field="over_bound", title="slowest rank over the lower bound, minus 1"),
            ),
        ),
        Table(
            title="Micro batches with a bound on their tokens",
            lines={**_SHAPE, "stages": "pipeline stages", "method": "method"},
            where={"kind": ("micro_batches", "pipeline")},
            columns=(
                milliseconds("seconds", "time"),
                Column(field="micro_batches", title="micro batches per rank"),
                Column(field="bound_micro_batches", title="lower bound of micro batches"),
                Column(field="fill", title="fill"),
                Column(field="imbalance", title="slowest rank over the mean, minus 1"),
                Column(field="duration_tokens", title="simulated 1F1B duration, tokens"),
            ),
        ),
        Table(
            title="First call in a process",
            lines={"method": "kernels"},
            where={"kind": ("first_call",)},
            columns=(Column(field="cpu_seconds", title="CPU seconds"),),
        ),
    ),
)

_JUDGED: Mapping[str, Sequence[Value]] = {"what": ("stack",)}
_RHYME = "RhymeRL's scheme, re-implemented, at equal staleness"


AT_SCALE = View(
    question="On paper, how long is a step of a model of 32B on 32, 128 and 512 H100 under each system?",
    answer=Answer(
        text=(
            "On 128 H100, ours in 8 bits is estimated {gain} times as fast as synchronous BF16, {eight} as RhymeRL's "
            "scheme (in BF16 {equal}); estimates err by up to {off} %."
        ),
        figures={
            "gain": goal("ours in 8 bits over synchronous BF16"),
            "eight": goal(f"over {_RHYME}, ours in 8 bits"),
            "equal": goal(f"over {_RHYME}, both in BF16"),
            "off": goal("estimate against published figures, largest difference", scale=100.0),
        },
    ),
    notes=(
        "Every speed is an estimate from the roofline of `megatron-rl plan`. Nothing was measured on a GPU.",
        "Stacks with the names of other systems are re-implementations of their schemes, with the same estimates as "
        "ours. None of their steps is a published figure.",
        "A step has 512 x 16 answers with 5,600 tokens on average and 20,480 at most. Training takes the same work in "
        "every stack.",
        "A stack whose trainer has GPUs of its own has the number of them that makes its step shortest.",
        "Drafts gain what the record of `benchmarks.drafting` says, and are left out where they do not pay.",
        "Published steps stand beside the estimate of the same step. Nothing was fitted to them.",
        "A stack is simulated in each arrangement that its design allows: `colocated`, trainer and engines use all "
        "GPUs in turns, or `disaggregated`. Goals take the faster arrangement of each stack.",
    ),
    tables=(
        *(
            Table(
                title=f"{model}: seconds of a step, by GPUs",
                lines={"stack": "stack", "arrangement": "arrangement"},
                where={**_JUDGED, "model": (model,)},
                across="gpus",
                columns=(_STEP,),
            )
            for model in ("Qwen2.5-32B", "Qwen3-30B-A3B")
        ),
        Table(
            title="Qwen2.5-32B on 128 GPUs",
            lines={"stack": "stack", "arrangement": "arrangement", "bound_by": "bound by"},
            where={**_JUDGED, "model": ("Qwen2.5-32B",), "gpus": (128,)},
            columns=(
                _STEP,
                Column(field="train_s", title="training, s"),
                Column(field="trainer_gpus", title="GPUs of the trainer"),
                Column(field="mean_staleness", title="mean staleness"),
                Column(field="max_staleness", title="largest staleness", reduce="most"),
            ),
        ),
        Table(
            title="Published figures",
            lines={"case": "case", "source": "source"},
            where={"what": ("published",)},
            columns=(
                Column(field="published", title="published"),
                Column(field="estimated", title="estimated"),
                Column(field="estimated_over_published", title="estimated over published"),
            ),
        ),
    ),
)
