"""Views of schedules, simulated and real, and of packing."""

from collections.abc import Mapping, Sequence

from benchmarks.harness.record_tables import Column, Table, Value
from benchmarks.harness.record_views.view import View, milliseconds, spread

_SCHEDULE: Mapping[str, Sequence[Value]] = {"what": ("schedule",), "drafts": ("none",), "trainer_gpus": (0,)}

_STEP = Column(field="step_s", title="step, s")

_SCHEDULE_COLUMNS = (
    _STEP,
    Column(field="bubble", title="bubble"),
    Column(field="idle", title="idle"),
    Column(field="mean_staleness", title="mean staleness"),
    Column(field="max_staleness", title="most", reduce="most"),
    Column(field="moved_groups", title="moved groups"),
)

PLANNER = View(
    question="How long is a step under each planner policy, how stale are its samples, how long does planning take?",
    tables=(
        Table(
            title="64 engines, forecasts by prompt (rank correlation 0.71)",
            lines={"scheme": "scheme"},
            where={**_SCHEDULE, "engines": (64,), "forecasts": ("groups",), "correlation": (0.6,)},
            columns=_SCHEDULE_COLUMNS,
        ),
        Table(
            title="64 engines, forecasts by response (correlation 0.9)",
            lines={"scheme": "scheme"},
            where={**_SCHEDULE, "engines": (64,), "forecasts": ("responses",), "correlation": (0.9,)},
            columns=_SCHEDULE_COLUMNS,
        ),
        Table(
            title="64 engines: seconds of a step by correlation of forecasts",
            lines={"scheme": "scheme", "forecasts": "forecasts"},
            where={**_SCHEDULE, "engines": (64,)},
            across="correlation",
            columns=(_STEP,),
        ),
        Table(
            title="64 engines: seconds of a step by drafts",
            lines={"scheme": "scheme", "forecasts": "forecasts"},
            where={"what": ("schedule",), "engines": (64,), "correlation": (0.6, 0.9), "trainer_gpus": (0,)},
            without={"forecasts": ("exact",)},
            across="drafts",
            columns=(_STEP,),
        ),
        Table(
            title="Seconds of a step by number of engines, forecasts by prompt",
            lines={"scheme": "scheme"},
            where={**_SCHEDULE, "forecasts": ("groups",), "correlation": (0.6,)},
            across="engines",
            columns=(_STEP,),
        ),
        Table(
            title="96 GPUs divided between engines and trainer",
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
            title="Planning a step, ms",
            lines={"scheme": "scheme"},
            where={"what": ("planning",)},
            across="responses",
            columns=(Column(field="ms", title="ms"),),
        ),
    ),
    notes=(
        "Engines are simulated with long-tailed lengths and 128 requests each. Speed in the goals is over `static`, "
        "synchronous.",
        "The commit of this record is in no published history, so nothing can be said about changes since.",
    ),
)


def _makespans(lengths: str) -> Table:
    return Table(
        title=f"Lengths that are {lengths}, medians over the repeats",
        lines={"scheme": "scheme"},
        where={"lengths": (lengths,)},
        columns=(
            *spread("makespan_s", "real makespan, s"),
            Column(field="simulated_s", title="simulated, s"),
            *spread("simulated_over_real", "simulated over real"),
            Column(field="idle", title="idle, real"),
            Column(field="simulated_idle", title="simulated"),
        ),
    )


PLANNER_ENGINES = View(
    question="Does the simulator of the planner's benchmark agree with two real engines under the same schedules?",
    tables=(_makespans("recorded"), _makespans("drawn")),
    notes=(
        "Prompts and seed of the run whose lengths are replayed were not recorded; the command makes such a run.",
        "The simulator is too slow where responses are longer than those its speeds were fitted to.",
    ),
)

_SHAPE = {"samples": "samples", "ranks": "ranks"}

PACKING = View(
    question="How evenly are samples dealt to ranks and packed into micro batches, and how long does packing take?",
    tables=(
        Table(
            title="Dealing samples to ranks",
            lines={**_SHAPE, "method": "method"},
            where={"kind": ("ranks",)},
            columns=(
                milliseconds("seconds", "time"),
                Column(field="imbalance", title="slowest rank over the mean, minus 1"),
                Column(field="over_bound", title="slowest rank over the lower bound, minus 1"),
            ),
        ),
        Table(
            title="Micro batches under a bound of tokens",
            lines={**_SHAPE, "stages": "pipeline stages", "method": "method"},
            where={"kind": ("micro_batches", "pipeline")},
            columns=(
                milliseconds("seconds", "time"),
                Column(field="micro_batches", title="micro batches a rank"),
                Column(field="bound_micro_batches", title="lower bound"),
                Column(field="fill", title="fill"),
                Column(field="imbalance", title="slowest rank over the mean, minus 1"),
                Column(field="duration_tokens", title="simulated 1F1B duration, tokens"),
            ),
        ),
        Table(
            title="First call of a process",
            lines={"method": "kernels"},
            where={"kind": ("first_call",)},
            columns=(Column(field="cpu_seconds", title="CPU seconds"),),
        ),
    ),
)
