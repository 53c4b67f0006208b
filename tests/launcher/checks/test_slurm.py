import pytest

from launcher.checks.slurm import slurm_problems, time_limit_s
from launcher.config.slurm import ContainerConfig, SlurmConfig


def test_defaults_and_a_whole_example_are_accepted() -> None:
    assert slurm_problems(SlurmConfig()) == []
    example = SlurmConfig(
        partition="gpu,long",
        constraint="[rack1|rack2]&h100",
        exclude="n[01-04,7]",
        time="2-00:00:00",
        extra=("--mail-type=END", "-w node3"),
        container=ContainerConfig(kind="pyxis", image="lab/rl:1", mounts=("/data:/data", "/a:/b:ro")),
        modules=("cuda/12.8",),
        environment=("WANDB_API_KEY",),
        interface="ib0",
        addresses={"n1": "10.0.0.1"},
    )
    assert slurm_problems(example) == []


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("partition", "gpu long", "`cluster.slurm.partition` = 'gpu long' has blanks or quotes"),
        ("account", "a\nb", "`cluster.slurm.account` = 'a\\nb' has blanks or quotes"),
        ("time", "2 days", "`cluster.slurm.time` = '2 days' is no time limit of SLURM; write MINUTES"),
        ("extra", ("mail-type=END",), "`cluster.slurm.extra` = 'mail-type=END' is no option of sbatch"),
        ("extra", ("--a\n#SBATCH --b",), "`cluster.slurm.extra` = '--a\\n#SBATCH --b' is no option of sbatch"),
        ("extra", ("--nodes=3",), "`cluster.slurm.extra` = '--nodes=3': the script sets --nodes itself; set `cluster"),
        (
            "extra",
            ("--no-requeue",),
            "`cluster.slurm.extra` = '--no-requeue': the script sets --no-requeue itself; copy",
        ),
        ("extra", ("-N4",), "`cluster.slurm.extra` = '-N4': the script sets --nodes itself; set `cluster.slurm.nodes`"),
        ("extra", ("-n 16",), "`cluster.slurm.extra` = '-n 16': the script sets --ntasks itself; copy the template"),
        ("extra", ("-c 8",), "`cluster.slurm.extra` = '-c 8': the script sets --cpus-per-task itself; set `cluster"),
        (
            "extra",
            ("-t 10",),
            "`cluster.slurm.extra` = '-t 10': the script sets --time itself; set `cluster.slurm.time`",
        ),
        ("extra", ("-J name",), "`cluster.slurm.extra` = '-J name': the script sets --job-name itself; set `cluster"),
        ("extra", ("-G 16",), "`cluster.slurm.extra` = '-G 16': set `cluster.slurm.gpus_per_node`, and name a type"),
        (
            "extra",
            ("--gpus-per-node=h100:8",),
            "`cluster.slurm.extra` = '--gpus-per-node=h100:8': set `cluster.slurm.g",
        ),
        (
            "extra",
            ("--part=long",),
            "`cluster.slurm.extra` = '--part=long': sbatch may read --part as --partition; write the option's whole",
        ),
        ("extra", ("--no-r",), "`cluster.slurm.extra` = '--no-r': sbatch may read --no-r as --no-requeue; write the"),
        ("extra", ("--ex n1",), "`cluster.slurm.extra` = '--ex n1': sbatch may read --ex as --exclude or --export; w"),
        ("extra", ("--gpus-per-n=4",), "`cluster.slurm.extra` = '--gpus-per-n=4': sbatch may read --gpus-per-n as --g"),
        ("extra", ("--gres=gpu:8",), "`cluster.slurm.extra` requests 8 GPU(s) of each node by --gres, but `cluster.sl"),
        ("environment", ("KEY=secret",), "`cluster.slurm.environment` = 'KEY=secret' is no variable name; give names"),
        ("modules", ("cuda 12",), "`cluster.slurm.modules` = 'cuda 12' is not one word"),
        ("interface", "ib0; rm", "`cluster.slurm.interface` = 'ib0; rm' is no interface name"),
        ("addresses", {"n1": "10.0.0"}, "`cluster.slurm.addresses.n1` = '10.0.0' is no IPv4 address"),
        ("container", ContainerConfig(image="x"), "`cluster.slurm.container.kind` = none with an image or mounts"),
        ("container", ContainerConfig(kind="pyxis"), "`cluster.slurm.container.kind` = pyxis without an image"),
        (
            "container",
            ContainerConfig(kind="apptainer", image="x", mounts=("data:/data",)),
            "`cluster.slurm.container.mounts` = 'data:/data' is not SOURCE:TARGET",
        ),
    ],
)
def test_a_bad_value_is_one_problem_that_names_it(key: str, value: object, problem: str) -> None:
    (found,) = slurm_problems(SlurmConfig(**{key: value}))
    assert found.startswith(problem)


@pytest.mark.parametrize(
    "option", ["--nodelist=n1", "--exclusive", "--time-min=10", "--gpu-bind=none", "--mem=0", "-w n1"]
)
def test_options_with_a_similar_name_are_accepted(option: str) -> None:
    assert slurm_problems(SlurmConfig(extra=(option,))) == []


@pytest.mark.parametrize("option", ["--gres=gpu:h100:8", "--gres=gpu:8", "--gres nvme:1,gpu:h100:6,gpu:a100:2"])
def test_gpus_of_a_type_are_as_many_as_the_run_uses(option: str) -> None:
    assert slurm_problems(SlurmConfig(gpus_per_node=8, extra=(option,))) == []
    (found,) = slurm_problems(SlurmConfig(gpus_per_node=4, extra=(option,)))
    assert "requests 8 GPU(s) of each node by --gres, but `cluster.slurm.gpus_per_node` = 4; set both" in found


def test_a_stop_must_come_before_the_time_limit_and_after_the_start() -> None:
    (found,) = slurm_problems(SlurmConfig(time="10", stop_before_s=600))
    assert "is not below the time limit of 600 s" in found


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:00:05", 3605), ("1-12", 129600), ("1-12:30", 131400), ("1-0:0:1", 86401)],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert time_limit_s(text) == seconds
