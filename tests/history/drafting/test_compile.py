"""All kernels are compiled or loaded before an engine decodes."""

import subprocess
import sys

import numba
import numpy as np

import history
from history.drafting.compile import compile_kernels
from history.drafting.drafter import Drafter
from history.drafting.forward_cost import ForwardCostModel
from tests.history.drafting.test_drafter import Engine, publish


def signatures() -> set[tuple[str, str]]:
    """Compiled signatures of this process, by function."""
    modules = [module for name, module in sys.modules.items() if name.startswith(history.__name__ + ".")]
    kernels = {value for module in modules for value in vars(module).values() if hasattr(value, "nopython_signatures")}
    assert all(isinstance(kernel, numba.core.dispatcher.Dispatcher) for kernel in kernels)
    return {(kernel.__qualname__, str(found)) for kernel in kernels for found in kernel.nopython_signatures}


def decode(folder) -> None:
    """Decode responses with and without history, with shared text, ends, and growth beyond initial capacities."""
    generator = np.random.default_rng(0)
    for length in (40, 600):
        said = [generator.integers(3, 50, length).tolist() for _ in range(3)]
        publish(folder, said[:2])
        cost_model = ForwardCostModel()
        drafter = Drafter(max_draft_tokens=8, segments_dir=str(folder), cost_model=cost_model, max_model_len=4096)
        engine = Engine(drafter, [*said, said[2]], keys=[1, 1, 1, 2])

        def observe(drafts, cost_model=cost_model) -> None:
            num_tokens = len(drafts) + sum(map(len, drafts))
            cost_model.observe(num_rows=len(drafts), num_tokens=num_tokens, num_context_tokens=9, seconds=0.01)

        engine.run(observe)
        drafter.drain()


def test_decoding_compiles_nothing(tmp_path):
    script = (
        "import sys, pathlib; from tests.history.drafting import test_compile as t; t.check(pathlib.Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


def check(folder) -> None:
    """Run in a new process without compiled kernels."""
    assert compile_kernels() > 4, "hardly a draft was accepted"
    before = signatures()
    assert len(before) > 10
    decode(folder)
    assert signatures() == before, signatures() - before
