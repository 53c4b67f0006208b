"""Inputs and outputs of this folder's scripts: checkpoints of tiny models, and answers of engines."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path


@dataclass(frozen=True)
class Checkpoints:
    """Directories of tiny models by (family, weights, format); weights are `A` or `B`."""

    root: Path

    def path(self, family: str, weights: str, format: str) -> Path:
        return self.root / f"{family}-{weights}-{format}"


def save_checkpoints(root: Path) -> Checkpoints:
    """Two sets of weights of every family in every format."""
    from tests.support.engines.tiny_vllm_models import FAMILIES, in_format, make_weights, save_checkpoint

    found = Checkpoints(root)
    for family in FAMILIES:
        formats = ("bf16", "int8", "fp8_channel", "fp8_block")
        for weights, seed in (("A", 1), ("B", 2)):
            tensors = make_weights(family, seed)
            for format in formats:
                save_checkpoint(found.path(family, weights, format), family, in_format(tensors, format), format)
    slower = found.path("qwen3", "A-with-another-rope", "bf16")
    save_checkpoint(slower, "qwen3", in_format(make_weights("qwen3", 1), "bf16"), "bf16")
    config = json.loads((slower / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 100
    (slower / "config.json").write_text(json.dumps(config))
    return found


@dataclass(frozen=True)
class Oracle:
    """Answers of `tests.support.engines.oracle`, by job name."""

    answers: dict[str, list[dict]]

    def fresh(self, family: str, weights: str, format: str, *, onednn: bool = False) -> dict:
        return self.answers[f"fresh-{family}-{weights}-{format}{'-onednn' * onednn}"][0]


def answers_of(checkpoints: Checkpoints, folder: Path, jobs: Sequence[dict]) -> Oracle:
    """Answers of the jobs."""
    from tests.support.runs.background import run_script

    return read_oracle(run_script("tests.support.engines.oracle", oracle_files(checkpoints, folder, jobs))[1])


def jobs_of_experts(checkpoints: Checkpoints) -> list[dict]:
    """Jobs of `tests.support.engines.oracle` that a CPU cannot do: experts in 8 bits."""
    return jobs_of_formats(checkpoints, "experts", ("int8", "fp8_channel", "fp8_block"))


def jobs_of_formats(checkpoints: Checkpoints, family: str, formats: Sequence[str]) -> list[dict]:
    """Jobs with weights of one family in the formats: loaded A, loaded B, and A, B, A pushed."""
    return [
        _job(checkpoints, kind, family, weights, format)
        for format in formats
        for kind, weights in (("fresh", "A"), ("fresh", "B"), ("push", "ABA"))
    ]


def _job(checkpoints: Checkpoints, kind: str, family: str, weights: str, format: str, **more: object) -> dict:
    suffix = "".join(f"-{key}" for key in more)
    return {
        "name": f"{kind}-{family}-{weights}-{format}{suffix}",
        "format": format,
        "directories": [str(checkpoints.path(family, each, format)) for each in weights],
        **more,
    }


def _jobs(checkpoints: Checkpoints) -> list[dict]:
    job = partial(_job, checkpoints)
    cases = [("qwen3", "bf16"), ("qwen3", "int8"), ("qwen2", "bf16"), ("qwen2", "int8"), ("llama", "int8")]
    cases += [("qwen2", "fp8_channel"), ("blocks", "fp8_block"), ("experts", "bf16")]
    jobs = [job("fresh", family, weights, format) for family, format in cases for weights in ("A", "B")]
    jobs += [job("push", family, "ABA", format) for family, format in cases]
    jobs += [job("fresh", "qwen3", weights, "int8", onednn=True) for weights in ("A", "B")]
    jobs += [job("push", "qwen3", "ABA", "int8", onednn=True)]
    jobs += [job("push", "qwen2", "AB", "bf16", without_quirk="tied_head_multiplies_by_old_embedding_after_reload")]
    jobs += [job("push", "experts", "AB", "bf16", without_quirk="experts_multiply_by_unpacked_weights_after_reload")]
    rope = [str(checkpoints.path("qwen3", weights, "bf16")) for weights in ("A-with-another-rope", "A")]
    jobs.append({"name": "push-into-another-rope", "format": "bf16", "directories": rope})
    return jobs


def oracle_files(checkpoints: Checkpoints, folder: Path, jobs: Sequence[dict] = ()) -> Sequence[str]:
    """Write the jobs of `tests.support.engines.oracle` (all that a CPU can do) and return its arguments: jobs,
    answers."""
    (folder / "jobs.json").write_text(json.dumps(jobs or _jobs(checkpoints)))
    return str(folder / "jobs.json"), str(folder / "answers.json")


def read_oracle(answers: str) -> Oracle:
    """Read the answers written by `tests.support.engines.oracle`."""
    return Oracle({job["name"]: job["answers"] for job in json.loads(Path(answers).read_text())})
