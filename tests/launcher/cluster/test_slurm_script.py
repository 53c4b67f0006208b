import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cluster.slurm_script import (
    DEFAULT_STOP_S,
    MIN_STOP_S,
    RecordedTimes,
    Submission,
    fill,
    gres_gpus,
    render,
    stop_notice_s,
)
from launcher.config.slurm import ContainerConfig, SlurmConfig
from launcher.errors import ConfigError
from launcher.run_dir.stop_request import read_request

SUBMISSION = Submission(
    run_dir=Path("/shared/my runs/$(touch x)/a"),
    config=Path("/shared/my runs/$(touch x)/a/slurm/config.yaml"),
    work_dir=Path("/work dirs/it's here"),
    python="/opt/venv/bin/python",
    stop_before_s=300,
)
FULL = SlurmConfig(
    nodes=4,
    spares=1,
    gpus_per_node=8,
    cpus_per_node=96,
    partition="gpu",
    account="lab",
    qos="high",
    time="1-12",
    constraint="h100&ib",
    exclude="n[1-3]",
    extra=("--mail-type=END", "--comment='two words'"),
    modules=("cuda/12.8",),
    environment=("WANDB_API_KEY",),
)


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_a_job_receives_the_variables_of_the_run_and_each_once() -> None:
    needed = replace(SUBMISSION, environment=("JUDGE_KEY", "WANDB_API_KEY", "HOME"))
    (line,) = [option for option in options(render(FULL, needed)) if option.startswith("--export=")]
    assert line == "--export=PATH,HOME,USER,LANG,LD_LIBRARY_PATH,WANDB_API_KEY,JUDGE_KEY"


def test_every_key_has_its_line() -> None:
    script = render(FULL, SUBMISSION)
    assert options(script) == [
        "--job-name=a",
        "--nodes=5",
        "--ntasks-per-node=1",
        "--partition=gpu",
        "--account=lab",
        "--qos=high",
        "--time=1-12",
        "--constraint=h100&ib",
        "--exclude=n[1-3]",
        "--gpus-per-node=8",
        "--cpus-per-task=96",
        '--output="/shared/my runs/$(touch x)/a/logs/slurm-%j.out"',
        "--open-mode=append",
        "--requeue",
        "--no-kill",
        "--signal=B:USR1@300",
        "--export=PATH,HOME,USER,LANG,LD_LIBRARY_PATH,WANDB_API_KEY",
        "--mail-type=END",
        "--comment='two words'",
    ]
    assert "module load cuda/12.8" in script
    assert script.startswith("#!/usr/bin/env bash\n#SBATCH ") and "set -euo pipefail" in script


def test_what_is_empty_is_left_to_slurm_and_whole_nodes_are_asked_for() -> None:
    assert options(render(SlurmConfig(), SUBMISSION))[:5] == [
        *("--job-name=a", "--nodes=1", "--ntasks-per-node=1", "--exclusive", "--mem=0")
    ]


def test_memory_of_the_users_own_takes_the_place_of_the_whole_nodes() -> None:
    given = options(render(SlurmConfig(extra=("--mem=500G",)), SUBMISSION))
    assert "--mem=500G" in given and "--mem=0" not in given


@pytest.mark.parametrize("option", ["--gres=gpu:h100:8", "--gres='gpu:h100:8'", "--gres nvme:1,gres:gpu:8"])
def test_gpus_of_a_type_take_the_place_of_gpus_without_one(option: str) -> None:
    """SLURM refuses a job that requests both."""
    given = options(render(SlurmConfig(gpus_per_node=8, extra=(option,)), SUBMISSION))
    assert option in given and not any(one.startswith("--gpus-per-node") for one in given)


@pytest.mark.parametrize(
    ("extra", "gpus"),
    [
        ((), None),
        (("--gres=nvme:1", "--gpu-bind=closest"), None),
        (("--gres=gpu",), 1),
        (("--gres=gpu:h100",), 1),
        (("--gres=gpu:4090:2",), 2),
        (("--gres=gpu:a100:2,gpu:h100:6",), 8),
        (("--gres=gpu:8", "--gres=gpu:4"), 4),
    ],
)
def test_gpus_of_generic_resources_are_counted_as_sbatch_counts_them(extra: tuple[str, ...], gpus: int | None) -> None:
    assert gres_gpus(extra) == gpus


def test_a_task_that_ends_never_ends_the_others_of_its_step() -> None:
    """Whatever KillOnBadExit and WaitTime of slurm.conf say; enroot's step may end as it likes."""
    lines = render(SlurmConfig(nodes=4), SUBMISSION).replace("\\\n", " ").splitlines()
    starts = [line for line in lines if re.search(r"\bsrun --overlap", line) and "timeout 60" not in line]
    assert len(starts) == 2 and all('"${alone[@]}"' in line for line in starts)
    assert "alone=(--kill-on-bad-exit=0 --wait=0)" in lines


def test_a_node_that_hangs_in_a_check_holds_the_job_for_a_limited_time() -> None:
    script = render(SlurmConfig(nodes=4), SUBMISSION)
    assert 'until within "$check_limit_s" "${step[@]}"' in script and 'within "$reduce_limit_s" "${step[@]}"' in script
    (within,) = (line for line in script.splitlines() if line.startswith("within()"))
    hangs = subprocess.run(["bash", "-c", f"{within}\nwithin 0.2 sleep 600"], timeout=60, check=False)
    fails = subprocess.run(["bash", "-c", f"{within}\nwithin 60 false"], timeout=60, check=False)
    assert (hangs.returncode, fails.returncode) == (124, 1)


def test_a_signal_stops_no_run_before_the_job_has_its_nodes(tmp_path: Path) -> None:
    """The run of another job may have the directory until then."""
    lines = render(SlurmConfig(), SUBMISSION).splitlines()
    first = lines.index('asked=""')
    function = "\n".join(lines[first : lines.index("}", first) + 1])
    after_choice = lines[lines.index('[ -z "$asked" ] || request_stop') - 2 :][:3]
    assert after_choice[0].startswith('prepare "$batch_node" 1 choose')
    script = f"""set -euo pipefail
        export run_dir={tmp_path} job_dir={tmp_path}
        say() {{ :; }}
        {function}
        trap request_stop USR1
        {after_choice[2]}
        kill -USR1 $$
        [ ! -e {tmp_path}/stop.json ]
        touch {tmp_path}/nodes
        {after_choice[2]}"""
    subprocess.run(["bash", "-c", script], timeout=60, check=True)
    request = read_request(tmp_path)
    assert request is not None and request.requeue and request.time_s > 0


@pytest.mark.parametrize(
    ("container", "python", "srun"),
    [
        (ContainerConfig(), "python=(/opt/venv/bin/python)", "srun_options=()"),
        (
            ContainerConfig(kind="pyxis", image="lab/rl:1", mounts=("/a b:/a b",)),
            "python=(python3)",
            "srun_options=(--container-image=lab/rl:1 '--container-workdir=/work dirs/it'\"'\"'s here' "
            "'--container-mounts=/tmp:/tmp,/a b:/a b' --container-name=\"megatron-rl-$SLURM_JOB_ID:no_exec\")",
        ),
        (
            ContainerConfig(kind="apptainer", image="/img/rl.sif", mounts=("/data:/data",), python="/opt/python"),
            "python=(apptainer exec --nv --pwd '/work dirs/it'\"'\"'s here' --bind /data:/data /img/rl.sif "
            "/opt/python)",
            "srun_options=()",
        ),
    ],
    ids=["none", "pyxis", "apptainer"],
)
def test_a_container_goes_around_python(container: ContainerConfig, python: str, srun: str) -> None:
    lines = [line.partition(" #")[0] for line in render(SlurmConfig(container=container), SUBMISSION).splitlines()]
    assert python in lines and srun in lines


def test_paths_are_quoted_for_the_shell() -> None:
    script = render(SlurmConfig(), SUBMISSION)
    head = "\n".join(line for line in script.splitlines() if line.startswith(("export run_dir=", "config=")))
    shown = subprocess.run(
        ["bash", "-euc", f'{head}\nprintf "%s" "$run_dir"'], capture_output=True, text=True, check=True
    )
    assert shown.stdout == str(SUBMISSION.run_dir)


@pytest.mark.parametrize("slurm", [SlurmConfig(), FULL], ids=["default", "full"])
def test_the_script_is_bash_and_shellcheck_has_nothing_to_say(slurm: SlurmConfig, tmp_path: Path) -> None:
    """shellcheck is asked where it is installed."""
    path = tmp_path / "job.sbatch"
    plain = replace(SUBMISSION, run_dir=Path("/shared/my runs/a"), config=Path("/shared/my runs/a/slurm/config.yaml"))
    path.write_text(render(slurm, plain))
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "")


def test_a_template_of_the_users_own_is_used_and_judged(tmp_path: Path) -> None:
    path = tmp_path / "mine.sh"
    path.write_text("@@SBATCH@@\n@@RUN@@\n")
    with pytest.raises(ConfigError, match=r"mine\.sh: unknown word\(s\) RUN; known are CONFIG"):
        render(SlurmConfig(template=str(path)), SUBMISSION)
    with pytest.raises(ConfigError, match=r"mine\.sh: lacks @@B@@"):
        fill("@@A@@", {"A": "1", "B": "2"}, name="mine.sh")
    with pytest.raises(ConfigError, match=r"absent\.sh: No such file"):
        render(SlurmConfig(template="absent.sh"), SUBMISSION)


def test_the_notice_of_a_stop_follows_the_longest_step_evaluation_and_save() -> None:
    def notice_s(*seconds: list[float], asked_s: int = 0) -> int:
        names = ("steps_s", "saves_s", "evaluations_s")
        return stop_notice_s(RecordedTimes(**dict(zip(names, seconds, strict=False))), asked_s=asked_s, limit_s=None)

    assert notice_s([100, 180, 90], [30, 40]) == 180 + 2 * 40 + MIN_STOP_S
    assert notice_s([100, 180, 90], [30, 40], [20, 50, 10]) == 180 + 50 + 2 * 40 + MIN_STOP_S
    assert notice_s([100, 180, 90], []) == 180 + 2 * 180 + MIN_STOP_S
    assert notice_s() == DEFAULT_STOP_S
    assert notice_s([100], [30], [900], asked_s=50) == 50


def test_the_notice_is_at_most_half_the_time_limit() -> None:
    assert stop_notice_s(RecordedTimes(), asked_s=0, limit_s=300) == 150
