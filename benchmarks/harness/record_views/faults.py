"""The pages of the records of deaths and freezes."""

from benchmarks.harness.record_answers import Answer, goal
from benchmarks.harness.record_tables import Column, Table
from benchmarks.harness.record_views.view import View, percent, spread

_LINES = {"role": "process", "fault": "fault", "run": "run"}
_REPEATED = {
    "reissued_groups": "groups begun again",
    "repeated_publishes": "repeated publishes",
    "scorer_restarts": "scorer restarts",
    "repeated_calls": "repeated calls",
}
"""Columns that older rows lack."""

FAULTS = View(
    question="Does a run end as promised when one of its processes is killed or frozen?",
    answer=Answer(
        text="{share} % of the disturbed runs did.",
        figures={"share": goal("runs that ended as promised", scale=100.0)},
    ),
    notes=(
        "Promised is: the run ends, each step has all its groups, and nothing stays in shared memory. A deterministic "
        "run (`exact`) also ends with the metrics and the weights of an undisturbed one.",
        "`ahead`: engines sample beside the trainer and receive INT8 weights over sockets. `drafting`: engines draft "
        "from the history.",
        "A run whose controller was killed, or whose exit code asks for it, was started again, as SLURM would do.",
        "In `scoring` a call of the reward function is under way, and each takes half a second. In other phases they "
        "end at once.",
        "A frozen controller is continued after 45 s, and a frozen job (all its processes) after 130 s. These are in "
        "their seconds. No other process is continued.",
        "Calls are those of the reward function. `-` stands for a cell that is not in the table, or whose rows were "
        "recorded before this was counted.",
        "Deadlines are short in these runs: 60 s for a call to the trainer, 20 s without a token of an engine.",
        "Seconds count from the signal to the end of the step that was under way, or to the end of the run after the "
        "last step. Without a fault they are one or two.",
    ),
    tables=(
        Table(
            title="Seconds until the step was done, by the phase in which the process was killed or frozen",
            lines=_LINES,
            across="phase",
            columns=(Column(field="until_next_step_s", title="seconds"),),
        ),
        Table(
            title="What was repeated",
            lines=_LINES,
            columns=(
                percent("as_promised", "ended as promised"),
                Column(field="starts", title="starts, most", reduce="most"),
                Column(field="trainer_restarts", title="trainer restarts, most", reduce="most"),
                Column(field="engine_restarts", title="engine restarts, most", reduce="most"),
                Column(field="repeated_steps", title="repeated steps, most", reduce="most"),
                *(Column(field=field, title=f"{title}, most", reduce="most") for field, title in _REPEATED.items()),
            ),
        ),
    ),
)

FAULT_SOAK = View(
    question="Does a run learn the same, and stay flat, while its processes are killed and frozen for hours?",
    answer=Answer(
        text=(
            "In {minutes} minutes, {steps} steps ended; the same steps earn {reward} more than undisturbed, and memory "
            "grows by {memory} %."
        ),
        figures={
            "minutes": goal("minutes"),
            "steps": goal("steps, each once"),
            "reward": goal("reward of the same steps, disturbed minus undisturbed"),
            "memory": goal("memory, growth", scale=100.0),
        },
    ),
    notes=(
        "A process of a random kind is killed or frozen every 20 to 90 seconds.",
        "A start that ended with an exit code that asks for it was followed by another one, as SLURM would do.",
        "The reward is the mean of the last steps that both runs have. Below 0, the disturbed run earns less.",
        "Growth compares the median of the last quarter of the time with that of the second quarter. All processes of "
        "the run are counted together.",
        "Seconds count from the signal to the next end of a step, with the rest of the step that was under way.",
    ),
    tables=(
        Table(
            title="Seconds until a step ended",
            lines={"role": "process", "fault": "fault"},
            columns=(
                *spread("until_next_step_s", "seconds"),
                Column(field="second", title="last of them after, min", scale=1 / 60, reduce="most"),
            ),
        ),
    ),
)
