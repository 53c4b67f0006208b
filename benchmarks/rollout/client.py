"""Engine processes of the benchmark, one per method; jobs and answers are JSON lines."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rollout.processes import ProcessEnv

Speculation = Mapping[str, str | int | float]
"""Fields of vLLM's `speculative_config`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How engines run their methods."""

    model: Path
    max_model_len: int
    max_num_seqs: int
    trained: bool = False
    """Whether the weights are those in the model's directory; else they are random."""
    own_sampler: bool = False
    """Whether stock and peers sample with the product's sampler, too."""
    settings: Mapping[str, Speculation] = field(default_factory=dict)
    """Settings of methods that replace those of `benchmarks.rollout.server`."""


class EngineProcess:
    """The engine process of one method (`benchmarks.rollout.server`), with one thread; calls wait for its answer."""

    def __init__(self, method: str, work: Path, setup: Setup) -> None:
        """`work` gets the log and the history's segments."""
        self.method = method
        self._work = work
        self._log = work / f"{method}.log"
        segments = work / "segments"
        segments.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.rollout.server", method, f"--model={setup.model}"]
        command += [f"--segments={segments}", f"--max-model-len={setup.max_model_len}"]
        command += [f"--max-num-seqs={setup.max_num_seqs}"]
        command += [f"--speculation={json.dumps(dict(setup.settings.get(method, {})))}"]
        command += (["--trained"] if setup.trained else []) + (["--own-sampler"] if setup.own_sampler else [])
        environment = os.environ | ProcessEnv(single_node=True).engine(threads=1)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self._answer()

    def decode(self, history: Path, traces: Path) -> dict[str, float]:
        """Decode these responses; returns the engine's figures."""
        return _with_rates(self._ask({"history": str(history), "traces": str(traces)}))

    def begin(self, history: Path, traces: Path) -> None:
        """Load the history and compute the prompts of these responses, for `decode_slice`."""
        self._ask({"history": str(history), "traces": str(traces), "pauses": True})

    def decode_slice(self) -> dict[str, float] | None:
        """Decode the next slice (`benchmarks.rollout.traced_engine.SLICE`); returns the figures after the last one."""
        figures = self._ask({})
        return None if "paused" in figures else _with_rates(figures)

    def sample(
        self, history: Path, prompts: Path, *, temperature: float, seed: int, max_tokens: int
    ) -> tuple[dict[str, float], list[list[int]]]:
        """Let the model sample responses to these prompts; returns the engine's figures and the response ids."""
        responses = self._work / f"{self.method}-responses.json"
        job = {"history": str(history), "traces": str(prompts), "responses": str(responses)}
        figures = _with_rates(self._ask({**job, "temperature": temperature, "seed": seed, "max_tokens": max_tokens}))
        return figures, json.loads(responses.read_text(encoding="utf-8"))

    def close(self) -> None:
        """End the process."""
        _open(self._process.stdin).close()
        self._process.wait()

    def _ask(self, job: Mapping[str, str | int | float]) -> dict[str, float]:
        print(json.dumps(job), file=_open(self._process.stdin), flush=True)
        return self._answer()

    def _answer(self) -> dict[str, float]:
        line = _open(self._process.stdout).readline()
        if not line:
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise SystemExit(f"the engine of {self.method!r} ended before it answered; the end of {self._log}:\n{tail}")
        answer: dict[str, float] = json.loads(line)
        return answer


def _with_rates(figures: dict[str, float]) -> dict[str, float]:
    num_tokens, num_drafted = figures["num_tokens"], figures["num_drafted"]
    return figures | {
        "accepted_share": (num_tokens - figures["num_row_forwards"]) / num_drafted if num_drafted else 0.0,
        "tokens_per_cpu_s": num_tokens / figures["cpu_s"],
        "tokens_per_row_forward": num_tokens / figures["num_row_forwards"],
    }


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@contextmanager
def engines(methods: Sequence[str], work: Path, setup: Setup) -> Iterator[Mapping[str, EngineProcess]]:
    """Start an engine process for each method, one after the other; all end with the context."""
    with ExitStack() as stack:
        running = {}
        for method in methods:
            running[method] = EngineProcess(method, work, setup)
            stack.callback(running[method].close)
        yield running
