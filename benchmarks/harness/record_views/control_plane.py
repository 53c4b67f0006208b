"""The page of the record of the controller's CPU time."""

from benchmarks.harness.record_answers import Answer, goal
from benchmarks.harness.record_tables import Column, Table
from benchmarks.harness.record_views.view import MIB, View

CONTROL_PLANE = View(
    question="What does the controller of a large run cost?",
    answer=Answer(
        text=(
            "At 512 engines and trainer ranks the controller takes {share} % of a 300 s step; its seconds grow with "
            "the power {exponent} of the scale."
        ),
        figures={
            "share": goal("controller at 512 engines and ranks, share of a step of 300 s", scale=100.0),
            "exponent": goal("growth of its seconds from 64 to 512, exponent"),
        },
    ),
    notes=(
        "The product's controller runs over stand-ins for engines, trainer ranks, scorers and history. They answer at "
        "once, by Ray, with answers of the real sizes.",
        "A step has 8,192 responses of about 14,000 tokens. The model is Qwen3-32B, published in INT8.",
        "CPU seconds are those of all threads of the controller's process, mean of two steps after one that warms up.",
        "`record`: metrics, samples and the forwards of all engines. `pool`: engines and scorers get groups.",
    ),
    tables=(
        Table(
            title="CPU seconds of the controller in a step",
            lines={"part": "part"},
            across="scale",
            columns=(Column(field="cpu_s", title="CPU seconds"),),
        ),
        Table(
            title="Memory of the controller after the steps, and what it puts into the object store",
            lines={"scale": "engines and ranks"},
            columns=(
                Column(field="memory_bytes", title="memory, MiB", scale=MIB),
                Column(field="stored_bytes", title="object store, MiB a step", scale=MIB),
            ),
        ),
    ),
)
