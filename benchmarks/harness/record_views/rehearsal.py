"""The page of the record of GPU code on stub devices."""

from benchmarks.harness.record_answers import Answer, goal
from benchmarks.harness.record_tables import Column, Table
from benchmarks.harness.record_views.view import View, percent

REHEARSAL = View(
    question="Does the GPU code run on the real CUDA packages, as far as that can be known without a GPU?",
    answer=Answer(
        text="{share} % of the cases pass on stub devices, whose kernels do nothing.",
        figures={"share": goal("cases that pass", scale=100.0)},
    ),
    notes=(
        "The packages are those of `make setup-cuda`. Under them lie stub libraries with the memory of the host "
        "(`tests/support/stub_cuda/`), so control flow, devices, dtypes and the choice of kernels are real.",
        "Stood in for are: the number of rows that a mask selects in vLLM's log-probabilities, `segment_reduce`, "
        "`repeat_interleave` by a tensor, cuDNN's attention, and the test that all magnitudes are finite.",
    ),
    tables=(
        Table(
            title="Cases",
            lines={"case": "case"},
            columns=(
                percent("passed", "passed"),
                Column(field="stages", title="stages"),
                Column(field="seconds", title="seconds"),
            ),
        ),
    ),
)
