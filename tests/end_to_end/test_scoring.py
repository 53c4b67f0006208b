"""Scorers and the text actor as Ray actors: groups side by side, writing beside scoring, and the death of each."""

import socket
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import ray

from rollout.config import RewardConfig
from rollout.data.tokenizer import TokenizerSource
from rollout.pool import heartbeat
from rollout.pool.heartbeat import Heartbeat
from rollout.types import GroupColumns, GroupId
from tests.support.byte_tokenizer import tokenizer_in, write_byte_tokenizer
from tests.support.deadline import DEADLINE_S
from tests.support.scored_groups import scored_group

NUM_GROUPS = 8
NUM_DEATHS = 3
"""Of the first scorer, over all tests here."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_byte_tokenizer(directory)
    return str(directory)


@pytest.fixture(scope="module")
def text(running, model):
    """A text actor and two scorers; whatever a test kills has started again when its last call has ended."""
    reward = RewardConfig(
        function="tests.support.reward_functions.moody",
        num_scorers=2,
        num_workers=2,
        timeout_s=DEADLINE_S,
        max_restarts=NUM_DEATHS,
    )
    made = running.start_text_processes(TokenizerSource(directory=model), reward, [running.nodes[0].name] * 2)
    yield made
    running.end(made.actors)


def submit(scorer, model, number, texts):
    tokenizer = tokenizer_in(model)
    encoded = [np.append(ids, 256) for ids in tokenizer.encode(texts, add_special_tokens=False)]
    response_ids = np.concatenate(encoded).astype(np.int32)
    columns = GroupColumns(
        prompt_ids=np.zeros(1, dtype=np.int32),
        response_ids=response_ids,
        rollout_logprobs=np.zeros(len(response_ids), dtype=np.float32),
        resampled=np.zeros(len(response_ids), dtype=np.bool_),
        offsets=np.cumsum([0, *(len(ids) for ids in encoded)]),
    )
    group = replace(scored_group(number).group, group_id=GroupId(number), seeds=tuple(range(len(texts))))
    return scorer.score.remote(group, columns)


def rewards(answer):
    return [score.reward for score in answer.scores]


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_hung_response_delays_neither_other_groups_nor_samples(text, model, tmp_path):
    """The time limit of the hung response is longer than the test: it ends by a file, after all else has come."""
    scorer, end = text.scorers[0], tmp_path / "end"
    hung = submit(scorer, model, 0, ["fine", f"until {end}"])
    others = [submit(scorer, model, number, ["fine"] * 4) for number in range(1, NUM_GROUPS)]
    answers = ray.get(others, timeout=DEADLINE_S)
    written = ray.get(
        text.text_actor.write_samples.remote([], samples_path=str(tmp_path / "s"), traces_path="", num_returned=1),
        timeout=DEADLINE_S,
    )
    assert ray.wait([hung], timeout=0)[0] == []
    assert [rewards(answer) for answer in answers] == [[1.0] * 4] * (NUM_GROUPS - 1)
    assert written.process.pid != answers[0].process.pid and (tmp_path / "s").exists()
    end.touch()
    assert rewards(ray.get(hung, timeout=DEADLINE_S)) == [1.0, 1.0]


@pytest.mark.parametrize("victim", ["scorer", "server of the workers"])
def test_after_a_death_no_group_is_lost_and_no_worker_is_left(text, model, tmp_path, victim):
    scorer, end = text.scorers[0], tmp_path / "end"
    before = ray.get(submit(scorer, model, 9, ["fine"]), timeout=DEADLINE_S).process
    (server,) = psutil.Process(before.pid).children()
    workers = server.children()
    calls = [submit(scorer, model, number, [f"until {end}", "fine"]) for number in range(3)]
    (server if victim != "scorer" else psutil.Process(before.pid)).kill()
    for process in (server, *workers):
        wait_for(lambda ended=process: not ended.is_running() or ended.status() == psutil.STATUS_ZOMBIE)
    end.touch()
    answers = ray.get(calls, timeout=DEADLINE_S)
    assert [rewards(answer) for answer in answers] == [[1.0, 1.0]] * 3
    assert all(answer.process != before for answer in answers)


def test_a_text_actor_that_dies_writes_the_samples_after_its_restart(text, tmp_path):
    actor = text.text_actor

    def write(name):
        options = {"samples_path": str(tmp_path / name), "traces_path": "", "num_returned": 1}
        return actor.write_samples.remote([], **options)

    before = ray.get(write("first"), timeout=DEADLINE_S).process
    psutil.Process(before.pid).kill()
    after = ray.get(write("second"), timeout=DEADLINE_S).process
    assert after != before and {path.name for path in tmp_path.iterdir()} == {"first", "second"}


def test_a_process_answers_its_heartbeat_while_its_work_waits(text, model, tmp_path):
    """The scorer waits for a response without end, and the text actor for an object that comes after that."""
    end = tmp_path / "end"
    hung = submit(text.scorers[0], model, 0, [f"until {end}"])
    group = replace(scored_group(0), columns=(hung,))
    writing = text.text_actor.write_samples.remote(
        [group], samples_path=str(tmp_path / "samples"), traces_path="", num_returned=1
    )
    ray.get([actor.alive.remote() for actor in text.actors for _ in range(3)], timeout=DEADLINE_S)
    assert ray.wait([writing, hung], timeout=0)[0] == []
    end.touch()
    assert ray.wait([hung, writing], num_returns=2, timeout=DEADLINE_S)[1] == []


@pytest.mark.parametrize("name", ["scorer", "text actor"])
def test_a_frozen_process_is_missed_and_its_successor_takes_over_its_call(text, model, tmp_path, name, monkeypatch):
    """Only the heartbeat ends it: the time limits of the work are longer than the test."""
    monkeypatch.setattr(heartbeat, "SILENT_S", 2.0)
    monkeypatch.setattr(heartbeat, "LOOK_EVERY_S", 0.2)
    actor = text.scorers[0] if name == "scorer" else text.text_actor

    def work(number):
        if name == "scorer":
            return submit(actor, model, number, ["fine"])
        return actor.write_samples.remote([], samples_path=str(tmp_path / f"{number}"), traces_path="", num_returned=1)

    before = ray.get(work(0), timeout=DEADLINE_S).process
    beat = Heartbeat(actor)
    wait_for(lambda: beat.missed() or beat.process)
    assert beat.named(name) == f"{name} (process {before.pid} on {socket.gethostname()})"
    psutil.Process(before.pid).suspend()
    call = work(1)
    wait_for(beat.missed)
    beat.end()
    assert not psutil.pid_exists(before.pid)
    assert ray.get(call, timeout=DEADLINE_S).process != before


def test_scorers_work_side_by_side(text, model, tmp_path):
    scorers, end = text.scorers, tmp_path / "end"
    hung = submit(scorers[0], model, 0, [f"until {end}"])
    answer = ray.get(submit(scorers[1], model, 1, ["fine"]), timeout=DEADLINE_S)
    end.touch()
    other = ray.get(hung, timeout=DEADLINE_S)
    assert (rewards(answer), rewards(other)) == ([1.0], [1.0]) and answer.process != other.process
