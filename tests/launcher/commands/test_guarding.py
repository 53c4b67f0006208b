"""The ladder of a run, and the engines of a level."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from launcher.checks.check import CheckedRun, check_run
from launcher.cluster.node import NodeResources
from launcher.commands.guarding import guarded, ladder_of
from launcher.config.loading import load
from launcher.config.schema import RunConfig
from megatron_rl.algorithm.guard import GuardState

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


def test_the_engines_of_a_level_differ_only_in_their_formats(write_config: Write, node: NodeResources) -> None:
    run = checked(write_config, node, *ACT)
    actions = ladder_of(run, lambda line: None)
    assert guarded(run, actions, GuardState(level=2)) is run
    in_layers = guarded(run, actions, GuardState(level=3, layers=(2,)))
    assert in_layers.format.bf16_modules == ("*.layers.2.*",)
    name = "model.layers.{}.mlp.down_proj.weight"
    assert [in_layers.format.excepts(name.format(layer), 4) for layer in range(4)] == [True, False, True, True]
    last = guarded(run, actions, GuardState(level=5, layers=(2,)))
    assert last.format.name == "bf16"
    assert last.config.model_copy(update={"engine": run.config.engine}) == run.config
    advised = checked(write_config, node, *ACT, "algorithm.guard.mode=advise")
    assert guarded(advised, actions, GuardState(level=5)) is advised


def test_engines_that_do_not_fit_are_no_action(write_config: Write, node: NodeResources) -> None:
    run = checked(write_config, node, *ACT)
    full = replace(run, nodes=(replace(node, available_bytes=1),))
    found, said = kinds(full)
    assert found == ["cap", "cap", "overlap"]
    assert len(said) == 3 and "engine.format = bf16 is no action of this run: " in said[1]
