"""The page of the record of GPU code on stub devices."""

from benchmarks.harness.record_answers import Answer, goal
from benchmarks.harness.record_tables import Column, Table
from benchmarks.harness.record_views.view import View

REHEARSAL = View(
    question="Does the GPU code run on the real CUDA packages, as far as that can be known without a GPU?",
    answer=Answer(
        text="{share} % of the cases pass on stub devices, whose kernels do nothing or run on the host.",
        figures={"share": goal("cases that pass", scale=100.0)},
    ),
    notes=(
        "The packages are those of `make setup-cuda`. Under them lie stub libraries with the memory of the host "
        "(`tests/support/stub_cuda/`), so control flow, devices, dtypes and the choice of kernels are real.",
        'A case is "stood in for" if it passed and the host answered in the place of kernels, which are named. '
        "Such answers are real numbers, but not those of a GPU's kernel.",
    ),
    tables=(
        Table(
            title="Cases",
            lines={"case": "case", "outcome": "outcome", "stood_in_for": "stood in for"},
            columns=(
                Column(field="stages", title="stages"),
                Column(field="seconds", title="seconds"),
            ),
        ),
    ),
)
