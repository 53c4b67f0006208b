"""Bad input as a new user makes it: each mistake ends in one screen, naming the value, the bound and the fix.

Every case goes through the command line in this process, and nothing is started.
"""

import errno
import fcntl
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile

import pytest

from launcher.cli import main
from launcher.config.loading import load, resolved_yaml
from launcher.config.schema import RunConfig
from launcher.errors import RunDirectoryError
from launcher.run_dir.run_lock import RunLock

Change = Callable[[Path], object]
"""Breaks a sound configuration; is given the folder that holds it, its data (`train.jsonl`) and `model/`."""


@dataclass(frozen=True)
class Case:
    """One mistake and the texts required in its message."""

    said: tuple[str, ...]
    change: Change = lambda work: None
    overrides: tuple[str, ...] = ()


def edit(old: str, new: str) -> Change:
    """Replace text of the configuration file."""

    def change(work: Path) -> None:
        text = (work / "run.yaml").read_text()
        assert old in text
        (work / "run.yaml").write_text(text.replace(old, new))

    return change


def write(name: str, content: str | bytes) -> Change:
    """Write a file in the folder."""
    return lambda work: (work / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def config_json(**changes: object) -> Change:
    """Change keys of the model's configuration; None removes one."""

    def change(work: Path) -> None:
        path = work / "model" / "config.json"
        values = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return change


def header(edited: Callable[[dict[str, dict[str, object]]], object]) -> Change:
    """Change the header of the weights and keep their bytes."""

    def change(work: Path) -> None:
        path = work / "model" / "model.safetensors"
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + length])
        edited(entries)
        text = json.dumps(entries).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return change


def weights(change: Callable[[bytes], bytes]) -> Change:
    """Change the bytes of the weight file."""

    def changed(work: Path) -> None:
        path = work / "model" / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return changed


def tied_with_another_output(work: Path) -> None:
    config_json(tie_word_embeddings=True)(work)
    path = work / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    content[begin + json.loads(content[8:begin])["lm_head.weight"]["data_offsets"][1] - 1] ^= 1
    path.write_bytes(content)


def parquet(work: Path) -> None:
    (work / "train.parquet").write_bytes(b"PAR1 and nothing behind it")
    edit("train.jsonl", "train.parquet")(work)


CASES = {
    # the configuration file
    "a tab": Case(("line 5, column 1: a tab; indent with spaces",), edit("  train:", "\ttrain:")),
    "a key one column off": Case(
        ("is not YAML: line 7, column 4", "in the block from line 5", "the same column"),
        edit("  max_prompt", "   max_prompt"),
    ),
    "an open bracket": Case(("is not YAML: line",), edit("num_steps: 3", "num_steps: [3")),
    "an empty file": Case(("is empty; it needs at least",), write("run.yaml", "# later\n")),
    "a list": Case(("expected a mapping of keys to values, found list",), write("run.yaml", "- model\n")),
    "not UTF-8": Case(
        ("is not UTF-8: byte 0xff at position 0; save it as UTF-8",), write("run.yaml", b"\xff\xfea\x00")
    ),
    "an alias in itself": Case(("is inside its own anchor",), edit("num_steps: 3", "num_steps: &a [*a]")),
    "a key twice": Case(("key `num_steps` is given twice",), edit("num_steps: 3", "num_steps: 3\nnum_steps: 4")),
    "an unknown key": Case(("unknown key `num_stepz`; did you mean `num_steps`?",), edit("num_steps", "num_stepz")),
    # overrides
    "an override of an unknown key": Case(
        ("override `trainer.lr=1`: unknown key `trainer.lr`",), overrides=("trainer.lr=1",)
    ),
    "an override without value": Case(("`num_steps` = null", "valid integer"), overrides=("num_steps=",)),
    "no steps": Case(("`num_steps` = 0", "greater than 0"), overrides=("num_steps=0",)),
    "negative steps": Case(("`num_steps` = -1", "greater than 0"), overrides=("num_steps=-1",)),
    "a learning rate in words": Case(
        ('`trainer.optimizer.learning_rate` = "fast"', "valid number"),
        overrides=("trainer.optimizer.learning_rate=fast",),
    ),
    "an infinite learning rate": Case(
        ("`trainer.optimizer.learning_rate` = Infinity", "finite number"),
        overrides=("trainer.optimizer.learning_rate=.inf",),
    ),
    "a number without end": Case(
        ("is no int (Exceeds the limit", "write it in quotes"), overrides=("num_steps=" + "1" * 5000,)
    ),
    "a number beyond all bounds": Case(
        ("override `num_steps=0xfff", "`num_steps` is a whole number of more than 128 bits"),
        overrides=("num_steps=0x" + "f" * 5000,),
    ),
    "a number beyond all bounds in the file": Case(
        ("run.yaml:7: `data.max_prompt_tokens` is a whole number of more than 128 bits",),
        edit("max_prompt_tokens: 64", "max_prompt_tokens: 1" + 400 * "0"),
    ),
    "a refill beyond all bounds": Case(
        ("`algorithm.max_refill` = 1e+307", "less than or equal to 1000"),
        overrides=("algorithm.max_refill=1e307", "algorithm.filter=accuracy"),
    ),
    "a date that is none": Case(
        ("run.yaml is not YAML: line 3, column 12", "2026-02-30 is no timestamp (day is out of range for month)"),
        edit("num_steps: 3", "num_steps: 2026-02-30"),
    ),
    "an override nested without end": Case(("lists or tables are too deep",), overrides=("model=" + "[" * 5000,)),
    "a limit of time beyond timers": Case(
        ("`trainer.timeout_s` = 10000000000.0", "less than or equal to 1000000000"),
        overrides=("trainer.timeout_s=1e10",),
    ),
    "more ranks than any cluster has": Case(
        ("`trainer.parallel.data` = 1000000", "less than or equal to 10000"),
        overrides=("trainer.parallel.data=1000000",),
    ),
    "an index beyond all bounds": Case(
        ("111...` is not an index of a list of 1 (0 is the first)",),
        overrides=("data.train." + "1" * 5000 + ".path=x",),
    ),
    "a seed beyond 63 bits": Case(
        ("`seed` = 9223372036854775808", "less than or equal to 9223372036854775807"),
        overrides=("seed=9223372036854775808",),
    ),
    "a limit of memory beyond 63 bits": Case(
        ("`reward.memory_bytes` = 9223372036854775808", "less than or equal to 9223372036854775807"),
        overrides=("reward.memory_bytes=9223372036854775808",),
    ),
    "a project of wandb with its entity": Case(
        ('`wandb.project` = "team/rl#1"', "the name of a project holds no # /;", "the variable WANDB_ENTITY"),
        overrides=('wandb.project="team/rl#1"',),
    ),
    "a project of wandb with a long name": Case(
        ("`wandb.project` = ", "at most 128 characters"), overrides=("wandb.project=" + "x" * 129,)
    ),
    # the model
    "a model with a long name": Case(
        ("`model` = xxx", "has a name of more than 255 bytes; shorten it"), overrides=("model=" + "x" * 300,)
    ),
    "no such model": Case(("`model` = nowhere: no such directory; download",), overrides=("model=nowhere",)),
    "a model without config.json": Case(
        ("holds no config.json",), lambda work: (work / "model" / "config.json").unlink()
    ),
    "config.json is not JSON": Case(("config.json: not JSON", "fetch it again"), write("model/config.json", '{"a":')),
    "config.json is binary": Case(("config.json: not JSON", "fetch it again"), write("model/config.json", b"\xff\xfe")),
    "another architecture": Case(
        ("model_type 'gpt2' is not supported", "needs one of llama, qwen2"), config_json(model_type="gpt2")
    ),
    "config.json lacks a field": Case(
        ("config.json: hidden_size is missing; needs a positive integer",), config_json(hidden_size=None)
    ),
    "tokenizer.json is cut short": Case(
        ("tokenizer.json is not a tokenizer's file: Invalid JSON", "fetch it again"),
        write("model/tokenizer.json", '{"model": {"vocab"'),
    ),
    "tokenizer_config.json is not JSON": Case(
        ("tokenizer_config.json is not JSON", "fetch it again"), write("model/tokenizer_config.json", "<html>")
    ),
    # the weights
    "weights that are no weights": Case(
        ("its header would be", "corrupt or cut short: fetch it again"), write("model/model.safetensors", "<html>" * 9)
    ),
    "weights with a broken header": Case(
        ("its header is corrupt (JSONDecodeError", "fetch it again"),
        weights(lambda found: found[:8] + b"?" + found[9:]),
    ),
    "weights cut short": Case(("it is cut short; fetch it again",), weights(lambda found: found[:-1000])),
    "empty weights": Case(("of 0 bytes has room for 0",), write("model/model.safetensors", "")),
    "a pointer of Git LFS": Case(
        ("is a pointer of Git LFS, not the weights; run `git lfs pull`",),
        write("model/model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
    ),
    "a tensor that contradicts itself": Case(
        ("its header is corrupt", "tensor model.norm.weight is BF16 [3] at bytes"),
        header(lambda entries: entries["model.norm.weight"].update(shape=[3])),
    ),
    "a tensor is missing": Case(
        ("does not hold the qwen3 model of its config.json: missing: model.norm.weight",),
        header(lambda entries: entries.update({"model.norm.weights": entries.pop("model.norm.weight")})),
    ),
    "tensors of another shape": Case(
        ("of another shape: ", "mlp.down_proj.weight is [128, 512], not [128, 384]"),
        config_json(intermediate_size=384),
    ),
    "an output layer of its own in a tied model": Case(
        ("`model`: ", "lm_head.weight (BF16) is no copy of", "set tie_word_embeddings to false"),
        tied_with_another_output,
    ),
    "two files with the same tensors": Case(
        ("model.safetensors and old.safetensors both hold", "remove the file that is not of this model"),
        lambda work: copyfile(work / "model" / "model.safetensors", work / "model" / "old.safetensors"),
    ),
    "an index that names another file": Case(
        ("index.json names b.safetensors, which is not there; the download is incomplete",),
        write("model/model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}'),
    ),
    "an index that is none": Case(
        ("is no index of weights", "fetch it again"), write("model/model.safetensors.index.json", "[]")
    ),
    # data
    "no such data": Case(
        ("`data.train.0.path` = nowhere.jsonl: no such file",), overrides=("data.train.0.path=nowhere.jsonl",)
    ),
    "empty data": Case(("train.jsonl: holds no rows",), write("train.jsonl", "\n")),
    "data that are not JSON": Case(("train.jsonl, line 1: not valid JSON",), write("train.jsonl", "prompt,answer\n")),
    "a number beyond bounds": Case(("line 1: not valid JSON",), write("train.jsonl", '{"answer": ' + "1" * 5000 + "}")),
    "data nested without end": Case(("line 1: not valid JSON",), write("train.jsonl", "[" * 100000)),
    "a row without prompt": Case(
        ("line 1: `prompt` None must be text", "the row has answer"), write("train.jsonl", '{"answer": "2"}\n')
    ),
    "a prompt that is a number": Case(
        ("line 1: `prompt` 3 must be text",), write("train.jsonl", '{"prompt": 3, "answer": "2"}\n')
    ),
    "a broken parquet file": Case(("train.parquet: not a parquet file",), parquet),
    "no such evaluation set": Case(
        ("`evaluation.sets.held.path` = nowhere.jsonl: no such file",),
        overrides=("evaluation.sets.held.path=nowhere.jsonl",),
    ),
    # the reward function
    "no such reward module": Case(
        ("`reward.function` = no_such.score: no module `no_such`",), overrides=("reward.function=no_such.score",)
    ),
    "a reward that is no path": Case(
        ("`reward.function` = score is no dotted path",), overrides=("reward.function=score",)
    ),
    "no such reward function": Case(
        ("defines no `compute_scores`; did you mean `compute_score`?",),
        overrides=("reward.function=rollout.rewards.exact.compute_scores",),
    ),
    "a reward that is a number": Case(
        ("`_TOLERANCE` is 1e-06, not a function",),
        overrides=("reward.function=rollout.rewards.exact._TOLERANCE",),
    ),
    # losses and advantages
    "a misspelt loss": Case(
        ('`algorithm.loss` = "clipped_surogate"', "did you mean `clipped_surrogate`?", "gspo, cispo"),
        overrides=("algorithm.loss=clipped_surogate",),
    ),
    "a loss by its former path": Case(
        ("override `algorithm.loss=megatron_rl.loss.gspo`", "write `gspo`"),
        overrides=("algorithm.loss=megatron_rl.loss.gspo",),
    ),
    "an advantage by its module's path": Case(
        ("`algorithm.advantage`", "write `grpo`"),
        overrides=("algorithm.advantage=megatron_rl.algorithm.advantages.grpo",),
    ),
    "no such function of one's own": Case(
        ("`algorithm.loss` = benchmarks.learning.coarse_codes.loss", "defines no `loss`"),
        overrides=("algorithm.loss=benchmarks.learning.coarse_codes.loss",),
    ),
    # the run directory and the machine
    "a run directory that is a file": Case(
        ("is a file; name a directory",), lambda work: (work / "run").write_text("")
    ),
    "a run directory with a long name": Case(
        ("`run_dir` = new/xxx", "has a name of more than 255 bytes; shorten it"),
        overrides=("run_dir=new/" + "x" * 300,),
    ),
    "a run directory with a long path": Case(
        ("`run_dir` = x/x/x", "File name too long; name another path"), overrides=("run_dir=" + "x/" * 3000,)
    ),
    "a run directory of two lines": Case((r"`run_dir` = 'a\nb' holds a line break",), overrides=(r'run_dir="a\nb"',)),
    "a warm start with a long name": Case(
        ("`history.warm_start` = xxx", "has a name of more than 255 bytes"),
        overrides=("history.warm_start=" + "x" * 300,),
    ),
    "a run directory in a file": Case(
        ("is a file, no directory can be made in it",),
        lambda work: ((work / "file").write_text(""), edit(f"{work}/run", f"{work}/file/run")(work)),
    ),
    "more ranks than fit": Case(
        ("GiB are available", "`trainer.parallel.data` = 256"),
        overrides=("trainer.parallel.data=512", "algorithm.prompts_per_step=512"),
    ),
}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Message of a refused command: one screen on standard error, without traceback."""
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err
    assert len(shown.err.splitlines()) <= 24 and max(map(len, shown.err.splitlines())) < 1000
    return shown.err


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_a_run_is_refused_on_one_screen_before_anything_starts(
    name: str, write_config: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config("")
    CASES[name].change(tmp_path)
    text = refused(["run", str(path), "--dry-run", *CASES[name].overrides], capsys)
    assert all(part in text for part in CASES[name].said), text


def test_a_configuration_that_is_a_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"`{tmp_path}` is a directory; name the YAML file in it" in refused(["run", str(tmp_path)], capsys)


def test_a_missing_configuration_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no configuration file `nowhere.yaml`: no such file (started in" in refused(["sft", "nowhere.yaml"], capsys)


def test_an_argument_that_is_not_an_override_is_refused_with_the_usage(
    write_config: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["run", str(write_config("")), "--dry-run", "num_steps"])
    assert exit.value.code == 2
    assert "unrecognized arguments: num_steps (an override is key=value)" in capsys.readouterr().err


def test_a_reward_module_with_a_syntax_error_is_refused_without_running_it(
    write_config: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_reward.py").write_text("def compute_score(a, b, c, d)\n    return 1.0\n")
    text = refused(["run", str(write_config("")), "--dry-run", "reward.function=my_reward.compute_score"], capsys)
    assert "my_reward.py is not Python: expected ':' (my_reward.py, line 1)" in text


def test_a_run_directory_locked_by_another_process_is_refused(
    write_config: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    lock = RunLock(tmp_path / "run" / "LOCK")
    try:
        text = refused(["run", str(write_config(""))], capsys)
    finally:
        lock.release()
    assert re.search(r"is in use by process \d+ on .*; wait for it, end it, or give another run_dir", text)


def test_a_run_directory_on_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(RunDirectoryError, match=r"no locks \(flock: Function not implemented\).*Lustre: `-o flock`"):
        RunLock(tmp_path / "LOCK")
    assert len([*Path("/proc/self/fd").iterdir()]) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda folder: (folder / "latest").write_text("newest\n"),
            "holds 'newest', not a step; checkpoints that are left: 2; write one of them into that file",
        ),
        (lambda folder: (folder / "2" / "state.json").write_text("{"), "2 has no readable state (JSONDecodeError"),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    change: Change, said: str, write_config: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    (folder / "2").mkdir(parents=True)
    (folder / "latest").write_text("2\n")
    change(folder)
    assert said in refused(["run", str(write_config(""))], capsys)


def test_exporting_a_run_without_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(["export", str(tmp_path), str(tmp_path / "out")], capsys)
    assert f"{tmp_path} holds no checkpoint; name the directory of a run that saved one" in text
    text = refused(["export", str(tmp_path), str(tmp_path / "out"), "--step", "-3"], capsys)
    assert "--step = -3: checkpoints are numbered from 0" in text


def test_exporting_to_an_existing_path_is_refused(
    write_config: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "checkpoints" / "2").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(resolved_yaml(load(RunConfig, write_config(""))))
    text = refused(["export", str(tmp_path / "run"), str(tmp_path / "model")], capsys)
    assert f"`output_dir` = {tmp_path / 'model'} exists; an export overwrites nothing" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"output_dir": "model"}, "is the model itself; name another directory"),
        ({"output_dir": "other"}, "exists and is no earlier output of `sft`; name another directory"),
        ({"log_path": "other"}, "other is a directory; name a file in it"),
        (
            {"log_path": "out/logs/metrics.jsonl"},
            "`log_path` = out/logs/metrics.jsonl is in `output_dir` = out, which is",
        ),
        ({"output_dir": "."}, "model is in `output_dir` = ., which is replaced; name another path"),
        (
            {"trainer": {"optimizer": {"learning_rate": 1e-6, "min_learning_rate": 1e-5}}},
            "`trainer.optimizer.min_learning_rate` = 1e-05 is above `trainer.optimizer.learning_rate` = 1e-06",
        ),
        (
            {"trainer": {"optimizer": {"warmup_steps": 9, "decay_steps": 5}}},
            "`trainer.optimizer.decay_steps` = 5 is below `trainer.optimizer.warmup_steps` = 9",
        ),
        ({"data": {"path": "wrong.jsonl"}}, "line 1: a row must be an object with `prompt` and `response`"),
    ],
)
def test_a_warm_start_with_invalid_paths_or_rows_is_refused(
    changes: dict[str, object],
    said: str,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "response": "2"}\n')
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
    settings = {"model": str(model_dir), "output_dir": "out", "num_steps": 1, "data": {"path": "rows.jsonl"}}
    (tmp_path / "sft.yaml").write_text(json.dumps({**settings, **changes}))
    assert said in refused(["sft", "sft.yaml", "data.max_tokens=64"], capsys)


def test_an_evaluation_whose_result_cannot_be_written_is_refused(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
    one = {"path": str(tmp_path / "rows.jsonl"), "max_response_tokens": 64}
    settings = {"model": str(model_dir), "sets": {"a": one}, "max_prompt_tokens": 64, "output": str(tmp_path)}
    (tmp_path / "eval.yaml").write_text(json.dumps(settings))
    assert f"`output` = {tmp_path} is a directory; name a file in it" in refused(
        ["eval", str(tmp_path / "eval.yaml")], capsys
    )
