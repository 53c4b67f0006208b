"""The page of the record of waits for checkpoints."""

from benchmarks.harness.record_answers import Answer, goal
from benchmarks.harness.record_tables import Column, Table
from benchmarks.harness.record_views.view import MIB, View

SAVES = View(
    question="How long does a run wait for a checkpoint that is written in the background?",
    answer=Answer(
        text="A run waits for {share} % of the time that a checkpoint in the background takes to reach the disk.",
        figures={"share": goal("wait for a save in the background, as a share of the save", scale=100.0)},
    ),
    notes=(
        "Two data-parallel ranks with the distributed optimizer hold a quarter of a billion random weights in few "
        "large matrices. Files are synchronised to the disk.",
        "In the background the run waits while the state is copied, and for the collectives at both ends.",
        "On a CPU, Megatron itself clones tensors that are parts of a larger storage, into fresh memory. It does so in "
        "the foreground too, and not for tensors on a device.",
    ),
    tables=(
        Table(
            title="Saves",
            lines={"kind": "kind", "save": "save"},
            columns=(
                Column(field="bytes", title="on disk, MiB", scale=MIB),
                Column(field="begin_s", title="until the trainer goes on, s"),
                Column(field="finish_s", title="at the end, s"),
                Column(field="blocked_s", title="waits, s"),
                Column(field="save_s", title="until the last file, s"),
            ),
        ),
    ),
)
