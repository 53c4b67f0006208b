"""The ladder of a run, and the engines of a level."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.checks.check import CheckedRun, check_run
from launcher.cluster.node import NodeResources
from launcher.commands import run as module
from launcher.commands.assembly import Shown
from launcher.commands.guarding import guarded, ladder_of
from launcher.commands.resume_point import ResumePoint, resume_point
from launcher.commands.specs import engine_specs
from launcher.config.loading import load
from launcher.config.schema import RunConfig
from launcher.endings.conclusion import Command
from launcher.run_dir.console import RunProgress
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.status import StatusFile
from megatron_rl.algorithm.guard import Action, GuardState
from megatron_rl.controller.stopping import EngineFormatError
from rollout.data.order import OrderState
from rollout.failures import ProcessLostError
from tests.launcher.conftest import MODEL, write_weights

Write = Callable[[str], Path]
ACT = ("algorithm.guard.mode=act", "engine.format=int8", "planner.overlap=1", "planner.max_staleness=1")


def checked(write_config: Write, node: NodeResources, *overrides: str) -> CheckedRun:
    return check_run(load(RunConfig, write_config(""), overrides), [node])


def kinds(run: CheckedRun) -> tuple[list[str], list[str]]:
    said: list[str] = []
    return [action.kind for action in ladder_of(run, said.append)], said


def test_a_run_has_the_actions_that_change_something(write_config: Write, node: NodeResources) -> None:
    run = checked(write_config, node, *ACT)
    assert run.spec.num_layers == 4  # two of them are 8-bit
    found, said = kinds(run)
    assert found == ["cap", "cap", "bf16_layers", "overlap", "bf16_rollouts"]
    assert len(said) == 1 and said[0].startswith("guard (act): correction.cap = 1.5; correction.cap = 1.2; 1 layer(s)")
    assert kinds(checked(write_config, node, *ACT, "algorithm.guard.mode=off")) == ([], [])
    assert kinds(checked(write_config, node, *ACT, "engine.format=bf16", "algorithm.correction.mode=none"))[0] == [
        "overlap"
    ]


@pytest.mark.parametrize("mode", ["icepop", "icepop_sequence", "mis_product", "mis_geometric"])
def test_a_cap_that_would_empty_the_band_of_the_correction_is_no_action(
    write_config: Write, node: NodeResources, mode: str
) -> None:
    band = (f"algorithm.correction.mode={mode}", "algorithm.correction.low=1", "algorithm.correction.cap=5")
    run = checked(write_config, node, *ACT, *band, "algorithm.guard.caps=[1.5, 1.0]")
    said: list[str] = []
    assert [action.value for action in ladder_of(run, said.append) if action.kind == "cap"] == [1.5]
    assert said[0] == "guard: correction.cap = 1 is no action of this run: correction.low = 1 is not below it"


@pytest.mark.parametrize("mode", ["tis_token", "tis_sequence"])
def test_a_lower_end_that_the_mode_does_not_read_keeps_no_cap_away(
    write_config: Write, node: NodeResources, mode: str
) -> None:
    unread = (f"algorithm.correction.mode={mode}", "algorithm.correction.low=1.4")
    assert kinds(checked(write_config, node, *ACT, *unread))[0][:2] == ["cap", "cap"]


def test_the_engines_of_a_level_differ_only_in_their_formats(write_config: Write, node: NodeResources) -> None:
    run = checked(write_config, node, *ACT, "engine.kv_format=fp8")
    actions = ladder_of(run, lambda line: None)
    assert guarded(run, actions, GuardState(level=2)) is run
    in_layers = guarded(run, actions, GuardState(level=3, layers=(2,)))
    assert in_layers.format.bf16_modules == ("*.layers.2.*",)
    name = "model.layers.{}.mlp.down_proj.weight"
    assert [in_layers.format.excepts(name.format(layer), 4) for layer in range(4)] == [True, False, True, True]
    last = guarded(run, actions, GuardState(level=5, layers=(2,)))
    assert last.format.name == "bf16" and last.config.engine.kv_format == "bf16"
    assert last.config.model_copy(update={"engine": run.config.engine}) == run.config
    assert guarded(run, actions, GuardState(level=5, is_advice=True)) is run
    advised = checked(write_config, node, *ACT, "algorithm.guard.mode=advise")
    assert guarded(advised, actions, GuardState(level=5)) is advised


def test_a_changed_configuration_leaves_engines_as_the_common_beginning_of_both_ladders_says(
    write_config: Write, node: NodeResources
) -> None:
    run = checked(write_config, node, *ACT, "algorithm.correction.cap=2")
    actions = ladder_of(run, lambda line: None)
    state = GuardState(level=3, layers=(2,), actions=actions[:3])
    assert guarded(run, actions, state).format.bf16_modules == ("*.layers.2.*",)
    capped = checked(write_config, node, *ACT, "algorithm.correction.cap=1.2")
    now = ladder_of(capped, lambda line: None)
    assert [action.kind for action in now] == ["bf16_layers", "overlap", "bf16_rollouts"]
    assert guarded(capped, now, state) is capped
    # whose third action is BF16 in all layers
    assert guarded(capped, now, replace(state, level=2, actions=actions[:2])) is capped


def test_engines_of_each_level_have_the_cache_that_the_fraction_leaves_them(
    write_config: Write, model_dir: Path
) -> None:
    """22 layers of 63 million parameters are in 8 bits, which leaves 1.3 GiB more of 40 GiB to the cache than BF16.
    With the cache of the configured engines the last level would exceed the GPU."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, **heads}
    (model_dir / "config.json").write_text(json.dumps(MODEL | shape))
    write_weights(model_dir)
    gpu = NodeResources(cpu_cores=96, available_bytes=1 << 40, gpu_bytes=(40 << 30,), gpu_capability=(9, 0))
    turns = ("engine.sleep_level=2", "trainer.offload=all", "trainer.recompute=full")
    run = checked(write_config, gpu, *ACT, *turns, "engine.format=fp8_channel", "engine.gpu_memory_fraction=0.98")
    actions = ladder_of(run, lambda line: None)
    expected = ["cap", "cap", "bf16_layers", "bf16_layers", "overlap", "bf16_rollouts"]
    assert [action.kind for action in actions] == expected
    num_layers = int(actions[2].value)
    in_layers = guarded(run, actions, GuardState(level=3, layers=tuple(range(10, 10 + num_layers))))
    last = guarded(run, actions, GuardState(level=6, layers=(10,)))
    assert len(in_layers.format.bf16_modules) == num_layers and last.format.name == "bf16"
    layer = 3 * 2048 * 8192 + (2 * 16 + 2 * 8) * 128 * 2048  # parameters, each a byte more in BF16
    for level, num_more in ((run, 0), (in_layers, num_layers), (last, 22)):
        (device,) = (table for table in level.memory.tables if table.kind == "device")
        assert 0.975 < device.total_bytes("rollout") / (40 << 30) <= 0.98
        cache = engine_specs(level.config, "x")[0].config.kv_cache_bytes
        assert cache == pytest.approx(run.config.engine.kv_cache_bytes - num_more * layer, abs=65 << 20)
        assert level.given.engine.gpu_memory_fraction == 0.98


def test_engines_that_do_not_fit_are_no_action(write_config: Write, node: NodeResources) -> None:
    run = checked(write_config, node, *ACT)
    full = replace(run, nodes=(replace(node, available_bytes=1),))
    found, said = kinds(full)
    assert found == ["cap", "cap", "overlap"]
    assert len(said) == 3 and "engine.format = engine.kv_format = bf16 is no action of this run: " in said[1]


def test_a_change_of_formats_goes_on_from_its_checkpoint_with_the_engines_of_the_level(
    write_config: Write, node: NodeResources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, starts, num_lost_nodes = checked(write_config, node, *ACT), [], 0

    def start(
        placed: CheckedRun, directory: RunDirectory, shown: Shown, resume: ResumePoint, actions: Sequence[Action]
    ) -> None:
        starts.append((resume.first_step, placed.config.engine.bf16_modules))
        if len(starts) == 1:
            folder = directory.begin_checkpoint(3)
            state = {
                "prompt_order": OrderState(fingerprint="").to_json(),
                "guard": GuardState(level=3, layers=(1,)).to_json(),
            }
            (folder / "state.json").write_text(json.dumps(state))
            directory.finish_checkpoint(3, 1)
            raise EngineFormatError(3, num_lost_nodes=num_lost_nodes)

    monkeypatch.setattr(module, "_run_engines", start)
    with RunDirectory(tmp_path / "run") as directory:
        status = StatusFile(run_dir=directory.path, num_steps=5)
        shown = Shown(progress=RunProgress(5), status=status, command=Command(name="run"))
        module._run(run, directory, shown, resume_point(directory))
        assert starts == [(0, ()), (3, ("*.layers.1.*",))]
        num_lost_nodes = 1
        starts.clear()
        with pytest.raises(ProcessLostError, match="after step 3, and 1 of the run's nodes are lost"):
            module._run(run, directory, shown, ResumePoint())
