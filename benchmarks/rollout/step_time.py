"""Time of a forward by rows, verified tokens and context, for engines with random weights.

`python -m benchmarks.rollout.step_time --json OUT [--device cuda] [--models 7B 14B] [--formats fp8_channel]
[--engines drafts] [--contexts 512] [--quick]`: for every model and
format, one engine without drafts and one that verifies drafts of given lengths, uniform over the rows or ragged. Times
come from the product's trace of forwards (`rollout.tracing.forwards`); they are medians over forwards in which every
row decodes. On CUDA the models have the shapes of 7B, 14B and 32B and the memory of an 80 GB device. There, the tokens
per second of a full device are measured too. On a CPU one small model shows that the benchmark works; its figures say
nothing about a GPU.

A row is one point of the cost model: `history.drafting.forward_cost.ForwardCostModel.load` fits a prior to the rows
of one model and format.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from benchmarks.harness.record import Row, arguments, write
from launcher.run_dir.atomic_files import replace_text
from rollout.config import EngineConfig, Format
from rollout.engine.spec import DraftSpec, EngineSpec
from rollout.processes import ProcessEnv

MAX_DRAFT_TOKENS = 16
UNIFORM = (0, 1, 2, 4, 8, 16)
RAGGED = ((0, 0, 0, 4), (0, 1, 2, 5), (0, 2, 6, 16))
"""Draft lengths, repeated over the rows."""
NUM_FORWARDS = 12
NUM_SETTLING = 2
"""Forwards after a change of lengths that are not measured."""
DEVICE_BYTES = 80e9
USABLE = 0.88
"""Share of a device's memory for weights, keys and values; activations and CUDA graphs need the rest."""
SATURATED_CONTEXT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a model with Qwen2.5's architecture."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool = False

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * (self.hidden // self.heads)

    def weight_bytes(self, format: Format) -> int:
        """Bytes of the weights: layers in `format`, embeddings in bfloat16."""
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * layer * (2 if format == "bf16" else 1) + 2 * embeddings

    def config(self) -> dict[str, object]:
        """Content of `config.json`."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 32_768,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
        }


CUDA_SHAPES = {
    "7B": Shape(hidden=3584, layers=28, heads=28, kv_heads=4, intermediate=18_944, vocabulary=152_064),
    "14B": Shape(hidden=5120, layers=48, heads=40, kv_heads=8, intermediate=13_824, vocabulary=152_064),
    "32B": Shape(hidden=5120, layers=64, heads=40, kv_heads=8, intermediate=27_648, vocabulary=152_064),
}
SMALL = Shape(hidden=1024, layers=12, heads=16, kv_heads=4, intermediate=3072, vocabulary=32_000, tied=True)
TINY = Shape(hidden=128, layers=2, heads=4, kv_heads=2, intermediate=256, vocabulary=32_000, tied=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The measured batch sizes and contexts."""

    batches: Sequence[int]
    contexts: Sequence[int]
    """Prompt tokens of each row."""

    def cells(self, max_kv_tokens: int) -> list[tuple[int, int]]:
        """(rows, context) of all batches that fit into the key-value memory."""
        pairs = [(batch, context) for context in self.contexts for batch in self.batches]
        return [(b, c) for b, c in pairs if b * (c + _response_tokens()) <= max_kv_tokens]


CUDA_GRID = Grid(batches=(1, 2, 4, 8, 16, 32, 64, 128, 256), contexts=(512, 4096, 16_384))
CPU_GRID = Grid(batches=(1, 2, 4, 8, 16, 32, 64), contexts=(32, 256))
QUICK_GRID = Grid(batches=(1, 4), contexts=(32,))
CPU_KV_TOKENS = 16_384
ENGINES = ("stock", "drafts")
"""Engines without drafts, and engines that verify drafts."""


def patterns(batch: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and lengths of the verified drafts; ragged ones need enough rows."""
    found: list[tuple[str, tuple[int, ...]]] = [("uniform", (length,)) for length in UNIFORM]
    return found + [("ragged", lengths) for lengths in RAGGED if len(lengths) <= batch]


def _response_tokens() -> int:
    """Most tokens that a row emits while it is measured; nearly every draft is rejected."""
    return 2 * (len(UNIFORM) + len(RAGGED)) * (NUM_FORWARDS + NUM_SETTLING) + MAX_DRAFT_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured engine."""

    model: str
    format: Format
    drafts: bool
    device: str
    quick: bool
    contexts: tuple[int, ...] = ()
    """Contexts instead of those of the grid."""

    @property
    def shape(self) -> Shape:
        """Shape of the model."""
        return CUDA_SHAPES[self.model] if self.device == "cuda" else TINY if self.quick else SMALL

    @property
    def kv_tokens(self) -> int:
        """Number of tokens whose keys and values fit."""
        if self.device != "cuda":
            return CPU_KV_TOKENS
        return int((USABLE * DEVICE_BYTES - self.shape.weight_bytes(self.format)) / self.shape.kv_bytes_per_token)

    @property
    def grid(self) -> Grid:
        """Batch sizes and contexts of this engine."""
        grid = QUICK_GRID if self.quick else CUDA_GRID if self.device == "cuda" else CPU_GRID
        return replace(grid, contexts=self.contexts or grid.contexts)

    @property
    def saturated_rows(self) -> int:
        """Number of requests of `SATURATED_CONTEXT` tokens that fill the device; 0 on a CPU."""
        fits = self.kv_tokens // (SATURATED_CONTEXT + _response_tokens())
        return min(fits, 512) if self.device == "cuda" and not self.drafts else 0


def measure(case: Case, directory: Path) -> Iterator[Row]:
    """Start the engine in this process and yield its rows."""
    from benchmarks.rollout.measured_engine import MeasuredEngine

    (directory / "config.json").write_text(json.dumps(case.shape.config()), encoding="utf-8")
    cells = case.grid.cells(case.kv_tokens)
    engine = MeasuredEngine(
        EngineSpec(
            engine_id=0,
            run_id="benchmark",
            config=EngineConfig(
                format=case.format,
                bf16_first_layers=0,
                bf16_last_layers=0,
                max_num_seqs=max([case.saturated_rows, *(batch for batch, _ in cells)]),
                kv_cache_bytes=case.kv_tokens * case.shape.kv_bytes_per_token,
                vllm={"enable_prefix_caching": False},
            ),
            directory=str(directory),
            max_model_len=max([SATURATED_CONTEXT, *case.grid.contexts]) + _response_tokens() + MAX_DRAFT_TOKENS,
            drafts=DraftSpec(max_draft_tokens=MAX_DRAFT_TOKENS) if case.drafts else None,
        ),
        vocabulary=case.shape.vocabulary,
    )
    known: Row = {
        "model": case.model,
        "format": case.format,
        "device": case.device,
        "engine": ENGINES[case.drafts],
        "weight_bytes": case.shape.weight_bytes(case.format),
    }
    for batch, context in cells:
        engine.fill(batch, context, max_tokens=_response_tokens())
        for name, lengths in patterns(batch) if case.drafts else [("none", (0,))]:
            yield {**known, "pattern": name, **engine.forwards(lengths, NUM_FORWARDS, NUM_SETTLING)}
        engine.empty()
    if rows := case.saturated_rows:
        engine.fill(rows, SATURATED_CONTEXT, max_tokens=_response_tokens())
        point = engine.forwards((0,), NUM_FORWARDS, NUM_SETTLING)
        rate = rows / float(point["seconds"])
        yield {**known, "pattern": "saturated", "kv_tokens": case.kv_tokens, **point, "tokens_per_s": rate}


def _run_case(case: Case, work: Path) -> list[Row]:
    """The rows of one engine, measured in a new process."""
    directory = work / f"{case.model}-{case.format}-{'drafts' if case.drafts else 'stock'}"
    directory.mkdir(parents=True, exist_ok=True)
    flags = ["--drafts"] * case.drafts + ["--quick"] * case.quick
    flags += ["--contexts", *map(str, case.contexts)] if case.contexts else []
    command = [sys.executable, "-m", "benchmarks.rollout.step_time", f"--json={directory / 'rows.json'}", *flags]
    command += ["--case", case.model, case.format, f"--device={case.device}", f"--work={work}"]
    with (directory / "log").open("wb") as log:
        threads = os.cpu_count() or 1 if case.device == "cuda" else 1
        environment = os.environ | ProcessEnv(single_node=True).engine(threads=threads)
        code = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode
    if code:
        tail = (directory / "log").read_text(encoding="utf-8", errors="replace")[-2000:]
        print(f"{directory.name}: exit code {code}\n{tail}", file=sys.stderr)
        return []
    rows: list[Row] = json.loads((directory / "rows.json").read_text(encoding="utf-8"))
    return rows


def _cases(options: argparse.Namespace) -> list[Case]:
    models = options.models or (
        list(CUDA_SHAPES) if options.device == "cuda" else ["tiny" if options.quick else "small"]
    )
    formats = options.formats or (get_args(Format)[:1] if options.quick else get_args(Format))
    return [
        Case(
            model=model,
            format=format,
            drafts=engine == "drafts",
            device=options.device,
            quick=options.quick,
            contexts=tuple(options.contexts),
        )
        for model in models
        for format in formats
        for engine in options.engines
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all engines, one after the other, and write the record."""
    parser = arguments("Duration of forwards by rows, verified tokens and context.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=list(CUDA_SHAPES), help="on CUDA; all of them by default")
    parser.add_argument("--formats", nargs="+", choices=get_args(Format), help="all of them by default")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--contexts", nargs="+", type=int, default=[], help="prompt tokens of each row")
    parser.add_argument("--work", type=Path, default=Path("runs/bench/step_time"))
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "FORMAT"), help="measure one engine in this process")
    parser.add_argument("--drafts", action="store_true", help="with --case: the engine that verifies drafts")
    options = parser.parse_args(argv)
    if options.case:
        model, format = options.case
        case = Case(
            model=model,
            format=format,
            drafts=options.drafts,
            device=options.device,
            quick=options.quick,
            contexts=tuple(options.contexts),
        )
        measured: list[Row] = []
        for row in measure(case, options.json.parent):  # an engine that is ended leaves what it has measured
            measured.append(row)
            replace_text(options.json, json.dumps(measured))
        return 0
    missing = [] if options.device == "cuda" else ["any GPU: a CPU's figures show that the mechanics work, no more"]
    rows: list[Row] = []
    failed = False
    for case in _cases(options):
        found = _run_case(case, options.work)
        if not found:
            missing.append(f"{case}: the engine failed; see its log")
            failed = True
        rows += found
        write(options.json, rows=rows, not_measured=missing)
    _show(rows)
    return int(failed)


def _show(rows: Sequence[Row]) -> None:
    for row in rows:
        print(*(f"{value:.5g}" if isinstance(value, float) else value for value in row.values()))


if __name__ == "__main__":
    sys.exit(main())
