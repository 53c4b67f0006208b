"""Peers are pinned, apart from this project, short where that was promised, and their result files are read."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.end_to_end import peers, run_arm
from benchmarks.end_to_end.arms import ARMS, PLAIN_LOOP
from benchmarks.end_to_end.model import CONTEXT
from benchmarks.end_to_end.peers import task
from benchmarks.end_to_end.peers.setup import PEERS
from benchmarks.end_to_end.run_arm import FULL, Place, peer_command, read_peer, read_product, split
from megatron_rl.algorithm.advantages import GroupOutcome, grpo
from megatron_rl.algorithm_settings import Grpo

FOLDER = Path(peers.__path__[0])


def response(length: int, reward: float) -> task.Response:
    return task.Response(prompt_ids=[1] * 10, ids=[2] * length, logprobs=[0.0] * length, reward=reward)


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_is_pinned_and_imports_nothing_of_this_project_but_the_task(peer: str) -> None:
    pins = [line for line in (FOLDER / f"{peer}.txt").read_text().splitlines() if not line.startswith("#")]
    assert pins and all(re.fullmatch(r"[\w.-]+==[\w.+]+", pin) for pin in pins)
    assert not [pin for pin in pins if pin.startswith(("torch", "nvidia", "megatron"))]
    source = (FOLDER / f"{peer}.py").read_text()
    ours = re.findall(
        r"^\s*from ((?:benchmarks|rollout|history|megatron_rl|launcher|examples)\S*) import (.*)", source, re.M
    )
    assert ours == [("benchmarks.end_to_end.peers", "task")]
    assert not re.search(
        r"^\s*(?:from|import) (?:benchmarks|rollout|history|megatron_rl|launcher|examples)",
        (FOLDER / "task.py").read_text(),
        re.M,
    )


def test_the_plain_loop_has_at_most_150_lines() -> None:
    assert len((FOLDER / "plain_loop.py").read_text().splitlines()) <= 150


def test_advantages_are_those_of_this_project_and_equal_rewards_have_none() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], dtype=np.float32)
    found = task.advantages([response(5, float(reward)) for reward in rewards])
    group = GroupOutcome(rewards=rewards, accuracies=rewards, lengths=np.full(8, 5), max_response_tokens=2000)
    ours = grpo(group, Grpo())
    assert [value for _, value in found] == pytest.approx(ours.tolist(), abs=1e-5)
    assert task.advantages([response(5, 1.0)] * 8) == []


def test_micro_batches_hold_every_sample_once_within_the_tokens() -> None:
    samples = [(response(length, 0.0), float(length)) for length in (900, 3, 700, 80, 80, 1200, 5)]
    batches = [*task.micro_batches(samples, 1000)]
    assert sorted(value for batch in batches for _, value in batch) == sorted(value for _, value in samples)
    for batch in batches:
        longest = max(10 + len(sample.ids) for sample, _ in batch)
        assert len(batch) == 1 or longest * len(batch) <= 1000


def test_a_peer_is_given_what_every_stack_is_given_and_its_files_are_read(tmp_path: Path) -> None:
    place = Place(warm=tmp_path / "warm", work=tmp_path, peers=tmp_path / "peers")
    command = peer_command(ARMS[PLAIN_LOOP], 1000, tmp_path / "run", place, FULL)
    settings = task.Settings.read(command[-1])
    assert (settings.num_steps, settings.context, settings.seed, settings.save_every) == (60, CONTEXT, 1000, 10)
    assert len(task.prompts(settings.train)) == 48
    saved: list[str] = []
    model = SimpleNamespace(save_pretrained=saved.append)
    for finished in (9, 10, 11, 20):
        task.save_if_due(settings, finished, model)
    assert [Path(each).relative_to(tmp_path / "run") for each in saved] == [Path("weights/10"), Path("weights/20")]
    task.write_step(settings, 0, [[response(4, 1.0), response(8, 0.0)]], (10.0, 17.0, 19.5, 20.0))
    task.write_seconds(settings, 1, 30.0)
    steps = read_peer(tmp_path / "run")
    assert steps[0]["time_s"] == 20.0 and steps[1]["time_s"] > 20.0
    found = split(steps)
    assert found["step_s"] == 20.0 and split(steps[:1])["rollout_share"] == 0.7 and steps[0]["tokens"] == 6.0
    assert not {"time_s", "step"} & set(found)


def test_steps_of_a_run_are_read_by_epoch(tmp_path: Path) -> None:
    rows = [
        {
            "step": step,
            "time_s": 100.0 + 4 * step,
            "timing_s/step": 4.0,
            "timing_s/rollout": 3.0,
            "history/tokens_per_forward": 1.0 if step < 12 else 2.0,
        }
        for step in range(24)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = read_product(tmp_path)
    assert (steps[1]["time_s"], steps[1]["step_s"]) == (104.0, 4.0)
    found = split(steps)
    assert found["rollout_share"] == 0.75
    assert (found["tokens_per_forward_first"], found["tokens_per_forward_later"]) == (1.0, 2.0)


def test_an_accuracy_has_the_seconds_at_which_its_step_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(warm=tmp_path / "warm", work=tmp_path, peers=tmp_path / "peers")
    rows = [{"step": step, "time_s": 1010.0 + 5 * step, "step_s": 5.0} for step in range(20)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(run_arm, "launch", lambda *_: (tmp_path, 1000.0, 120.0))
    monkeypatch.setattr(run_arm, "accuracies_of", lambda *_: {0: 0.5, 10: 0.6, 20: 0.75})
    whole, *points = run_arm.run(PLAIN_LOOP, ARMS[PLAIN_LOOP], 1000, place, FULL)
    assert [(row["step"], row["seconds"], row["accuracy"]) for row in points] == [
        (0, 5.0, 0.5),
        (10, 55.0, 0.6),
        (20, 105.0, 0.75),
    ]
    assert (whole["start_s"], whole["steps_s"], whole["seconds"]) == (5.0, 100.0, 120.0)
