from pathlib import Path

import pytest

from launcher.config.loading import resolved_yaml
from launcher.config.schema import RunConfig
from launcher.errors import RunDirectoryError
from launcher.run_dir.resume import FIRST_MODEL, changed_keys, check_first_model


def run_config(**parts: object) -> RunConfig:
    return RunConfig.model_validate(
        {"model": "m", "run_dir": "r", "num_steps": 3, "data": {"train": [{"path": "x.jsonl"}]}, **parts}
    )


def test_a_first_start_and_an_unchanged_configuration_report_nothing(tmp_path: Path) -> None:
    assert changed_keys(tmp_path, run_config()) == []
    (tmp_path / "config.yaml").write_text(resolved_yaml(run_config()))
    assert changed_keys(tmp_path, run_config()) == []


def test_a_permitted_change_of_configuration_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(resolved_yaml(run_config()))
    now = run_config(num_steps=9, trainer={"parallel": {"tensor": 2}}, evaluation={"sets": {"a": {"path": "y"}}})
    lines = changed_keys(tmp_path, now)
    assert "num_steps: 3 -> 9" in lines
    assert "trainer.parallel.tensor: 1 -> 2" in lines
    assert "evaluation.sets.a.path: None -> y" in lines


def test_more_steps_under_a_decaying_learning_rate_are_reported_with_their_consequence(tmp_path: Path) -> None:
    decaying = {"optimizer": {"decay": "cosine"}}
    (tmp_path / "config.yaml").write_text(resolved_yaml(run_config(trainer=decaying)))
    (line,) = changed_keys(tmp_path, run_config(num_steps=9, trainer=decaying))
    assert line.startswith("num_steps: 3 -> 9 (the learning rate now decays until step 9;")


def test_the_decaying_learning_rate_of_a_critic_is_reported_too(tmp_path: Path) -> None:
    decaying: dict[str, object] = {"optimizer": {"decay": "linear"}}
    trainer: dict[str, object] = {"critic": decaying}
    (tmp_path / "config.yaml").write_text(resolved_yaml(run_config(trainer=trainer)))
    (line,) = changed_keys(tmp_path, run_config(num_steps=9, trainer=trainer))
    assert line == (
        "num_steps: 3 -> 9 (the critic's learning rate now decays until step 9; fix it by "
        "trainer.critic.optimizer.decay_steps)"
    )
    both = trainer | decaying
    (tmp_path / "config.yaml").write_text(resolved_yaml(run_config(trainer=both)))
    (line,) = changed_keys(tmp_path, run_config(num_steps=9, trainer=both))
    assert "(the learning rate now decays" in line and "; the critic's learning rate now decays" in line
    fixed: dict[str, object] = {"critic": {"optimizer": {"decay": "linear", "decay_steps": 3}}}
    (tmp_path / "config.yaml").write_text(resolved_yaml(run_config(trainer=fixed)))
    assert changed_keys(tmp_path, run_config(num_steps=9, trainer=fixed)) == ["num_steps: 3 -> 9"]


@pytest.mark.parametrize(
    ("optimizer", "consequence"),
    [
        ({}, ""),
        ({"decay": "cosine"}, " (the learning rate keeps its place in the run and decays until step 3)"),
        (
            {"decay": "cosine", "warmup_steps": 2},
            " (once its warm-up is over, the learning rate keeps its place in the run and decays until step 3)",
        ),
        (
            {"decay": "linear", "decay_steps": 9},
            " (trainer.optimizer.decay_steps = 9 counts optimizer steps, now 8 a step)",
        ),
    ],
)
def test_other_optimizer_steps_of_a_step_are_reported_with_what_they_do_to_the_rate(
    tmp_path: Path, optimizer: dict[str, object], consequence: str
) -> None:
    parts = {"trainer": {"optimizer": optimizer}}
    (tmp_path / "config.yaml").write_text(resolved_yaml(run_config(**parts)))
    now = run_config(algorithm={"num_mini_batches": 4, "num_epochs": 2, "prompts_per_step": 4}, **parts)
    lines = changed_keys(tmp_path, now)
    assert f"algorithm.num_mini_batches: 1 -> 4{consequence}" in lines
    assert f"algorithm.num_epochs: 1 -> 2{consequence}" in lines


def test_changed_warm_ups_and_starts_of_coefficients_are_reported_with_what_they_do(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(resolved_yaml(run_config()))
    now = run_config(
        trainer={"optimizer": {"warmup_steps": 5}},
        algorithm={"kl": {"place": "loss", "coefficient": 0.05, "target": 0.1}, "entropy": {"coefficient": 0.01}},
    )
    lines = changed_keys(tmp_path, now)
    assert "trainer.optimizer.warmup_steps: 0 -> 5 (a warm-up that is over stays over)" in lines
    anew = "(the adaptive coefficient begins anew there, but not from a checkpoint of an earlier version)"
    assert f"algorithm.kl.coefficient: 0.001 -> 0.05 {anew}" in lines
    assert "algorithm.entropy.coefficient: 0.0 -> 0.01" in lines


@pytest.mark.parametrize(
    ("optimizer", "consequence"),
    [
        ({}, ""),
        ({"decay": "linear", "decay_steps": 9}, ""),
        (
            {"decay": "cosine"},
            " (the schedule of the policy's learning rate begins after these steps, so the rate moves)",
        ),
    ],
)
def test_another_warm_up_of_the_critic_is_reported_with_what_it_does_to_the_policys_rate(
    tmp_path: Path, optimizer: dict[str, object], consequence: str
) -> None:
    (tmp_path / "config.yaml").write_text(resolved_yaml(run_config(trainer={"optimizer": optimizer})))
    now = run_config(trainer={"optimizer": optimizer, "critic": {"warmup_steps": 2}})
    assert f"trainer.critic.warmup_steps: 0 -> 2{consequence}" in changed_keys(tmp_path, now)


@pytest.mark.parametrize(
    "parts", [{"seed": 1}, {"model": "other"}, {"data": {"train": [{"path": "z.jsonl"}]}}, {"deterministic": True}]
)
def test_a_forbidden_change_of_configuration_is_refused_naming_both_values(
    tmp_path: Path, parts: dict[str, object]
) -> None:
    (tmp_path / "config.yaml").write_text(resolved_yaml(run_config()))
    with pytest.raises(RunDirectoryError, match=rf"{next(iter(parts))}.* -> "):
        changed_keys(tmp_path, run_config(**parts))


@pytest.mark.parametrize(
    ("key", "former", "short"),
    [
        ("loss", "megatron_rl.loss.clipped_surrogate", "clipped_surrogate"),
        ("advantage", "megatron_rl.advantages.grpo", "grpo"),
        ("advantage", "megatron_rl.algorithm.advantages.rloo", "rloo"),
    ],
)
def test_a_saved_configuration_with_a_former_path_is_refused_with_the_short_name(
    tmp_path: Path, key: str, former: str, short: str
) -> None:
    text = resolved_yaml(run_config(algorithm={key: short}))
    (tmp_path / "config.yaml").write_text(text.replace(f"{key}:\n    name: {short}\n", f"{key}:\n    name: {former}\n"))
    with pytest.raises(RunDirectoryError, match=rf"config\.yaml`: `algorithm\.{key}` = {former}: .*write `{short}`"):
        changed_keys(tmp_path, run_config(algorithm={key: short}))


def weights(folder: Path, *parts: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for number, part in enumerate(parts):
        (folder / f"model-{number}.safetensors").write_bytes(part)
    return folder


@pytest.mark.parametrize(
    "changed",
    [(b"a" * 99, b"c" * 99), (b"a" * 99, b"b" * 98), (b"a" * 99, b"b" * 99, b""), (b"b" * 99, b"a" * 99)],
    ids=["values", "size", "another file", "order"],
)
def test_a_resume_needs_the_weights_that_the_run_started_from(tmp_path: Path, changed: tuple[bytes, ...]) -> None:
    model = weights(tmp_path / "model", b"a" * 99, b"b" * 99)
    check_first_model(tmp_path, model, resumes=False)
    check_first_model(tmp_path, model, resumes=True)
    weights(model, *changed)
    with pytest.raises(RunDirectoryError, match="holds other weights than at the first start"):
        check_first_model(tmp_path, model, resumes=True)
    weights(model, b"a" * 99, b"b" * 99)
    (model / "model-2.safetensors").unlink(missing_ok=True)
    check_first_model(tmp_path, model, resumes=True)


def test_files_of_another_directory_with_the_same_weights_are_accepted(tmp_path: Path) -> None:
    check_first_model(tmp_path, weights(tmp_path / "model", b"a" * 99), resumes=False)
    check_first_model(tmp_path, weights(tmp_path / "copy", b"a" * 99), resumes=True)


def test_a_run_that_begins_anew_or_is_of_an_older_version_notes_its_weights(tmp_path: Path) -> None:
    check_first_model(tmp_path, weights(tmp_path / "model", b"a"), resumes=False)
    check_first_model(tmp_path, weights(tmp_path / "model", b"b"), resumes=False)
    check_first_model(tmp_path, tmp_path / "model", resumes=True)
    (tmp_path / FIRST_MODEL).unlink()
    check_first_model(tmp_path, weights(tmp_path / "model", b"c"), resumes=True)
    assert (tmp_path / FIRST_MODEL).is_file()


def test_a_change_at_either_end_of_a_large_file_is_seen(tmp_path: Path) -> None:
    size = 3 << 20
    check_first_model(tmp_path, weights(tmp_path / "model", bytes(size)), resumes=False)
    for changed in (b"1" + bytes(size - 1), bytes(size - 1) + b"1"):
        weights(tmp_path / "model", changed)
        with pytest.raises(RunDirectoryError, match="holds other weights"):
            check_first_model(tmp_path, tmp_path / "model", resumes=True)
