"""A trainer of two ranks and two engines, as a run has them: what is published is what both sample from."""

import os
from contextlib import ExitStack, suppress

import numpy as np
import psutil
import pytest
import ray
import torch
from ray._raylet import AuthenticationMode, get_authentication_mode
from transformers.models.auto import AutoModelForCausalLM

from megatron_rl.batching.balance import PackingRules
from megatron_rl.batching.batch import build_batch
from megatron_rl.batching.cost_model import CostModel
from megatron_rl.config import AlgorithmConfig
from rollout.engine.state import EngineStatus
from rollout.group_parts import joined
from rollout.planning.plan import GroupForecast, RolloutPlan
from tests.support.deadline import DEADLINE_S
from tests.support.strangers import knocking

PROMPT_AND_ON = [5, 9, 17, 33, 60, 7, 81, 120, 3, 44]


@pytest.fixture(scope="module")
def published(ring):
    """The ring once both engines have served a publish."""
    if ring.version < 0:
        assert [state.status for state in ring.states()] == [EngineStatus.FENCED] * 2
        ring.publish()
    return ring


def listening() -> list[tuple[str, str, int]]:
    """Name, address and port of every TCP socket on which a process that this session has started listens."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = []
    for process in family:
        with suppress(psutil.NoSuchProcess):
            name, sockets = " ".join(process.cmdline())[:80], process.net_connections(kind="tcp")
            found += [(name, at.laddr.ip, at.laddr.port) for at in sockets if at.status == psutil.CONN_LISTEN]
    return found


@pytest.mark.usefixtures("published")
def test_a_local_run_listens_on_the_loopback_device_only_and_asks_for_a_secret():
    sockets = listening()
    assert any("raylet" in name for name, *_ in sockets) and any("Trainer" in name for name, *_ in sockets)
    others = [at for at in sockets if at[1] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")]
    assert not others, "\n".join(map(str, others))
    assert get_authentication_mode() == AuthenticationMode.TOKEN and len(os.environ["RAY_AUTH_TOKEN"]) == 64


def hugging_face_logprobs(directory: str, token_ids: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].numpy()


def probed(ring) -> np.ndarray:
    """Log-probabilities of the probe text, [engines, len - 1]."""
    return np.array(list(ring.engines.wait(ring.engines.begin_probe(PROMPT_AND_ON), timeout_s=DEADLINE_S).values()))


def learn(ring, groups) -> None:
    algorithm = AlgorithmConfig(group_size=4, filter="none")
    batch = build_batch(
        groups,
        ring.version,
        algorithm=algorithm,
        rules=PackingRules(num_ranks=1, max_tokens=256, costs=CostModel(parity_tokens=1000)),
        seed=0,
    )
    result = ring.trainer.train(batch)
    assert (result.num_optimizer_steps, result.num_skipped_updates) == (1, 0)


def taken(ring, groups):
    """Scored groups, each of which was admitted as a step of its own."""
    ring.pool.admit(groups)
    scored_groups = [scored for group in groups for scored in ring.pool.take("train", group.step)]
    ring.pool.check_integrity()
    return scored_groups


def test_the_first_publish_makes_both_engines_compute_what_the_directory_says(published):
    if published.version > 0:
        pytest.fail("another test trained first; this file must see the weights of the directory")
    first, second = probed(published)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, hugging_face_logprobs(published.directory, PROMPT_AND_ON), atol=0.06)


def test_groups_are_spread_over_both_engines_and_come_back_whole(published):
    scored = taken(published, published.groups(6))
    assert {group.summary.engine_id for group in scored} == {0, 1}
    for group in scored:
        columns = joined(ray.get(list(group.columns)))
        assert group.summary.lengths == tuple(np.diff(columns.offsets))
        assert group.rewards == tuple(columns.response_ids[columns.offsets[1:] - 1])
        assert len(columns.rollout_logprobs) == columns.offsets[-1]
        assert {span.weight_version for spans in group.summary.weight_spans for span in spans} == {published.version}


def test_what_was_learned_is_sampled_from_on_both_engines_after_the_next_publish(published):
    scored = taken(published, published.groups(4))
    before = probed(published)
    learn(published, scored)
    np.testing.assert_array_equal(probed(published), before)
    report = published.publish()
    assert max(report.probe_gaps) < 0.05
    first, second = probed(published)
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - before[0]).max() > 0
    (group,) = published.groups(1)
    summary, _ = published.sample_on(1, group)
    assert summary.oldest_version == published.version


class FirstBegun:
    """Moves the first group of which every response has begun."""

    def choose(self, running):
        return next((group.group_id for group in running if group.emitted and min(group.emitted) > 0), None)


def test_a_running_group_goes_on_where_nothing_runs_and_keeps_what_it_has(published):
    """Engine 1 is given nothing; when the short group of engine 0 has ended, one of the long ones moves."""
    made = [*published.groups(1, max_response_tokens=4), *published.groups(2, max_response_tokens=100, temperature=1.0)]
    forecasts = [GroupForecast(group_id=g.group_id, step=g.step, num_responses=4, tokens=50.0) for g in made]
    pool = published.pool
    pool.migration.rule = FirstBegun()
    try:
        pool.admit(made, RolloutPlan(queues=(tuple(forecasts), ()), shares_work=False))
        short, *long = [scored for group in made for scored in pool.take("train", group.step)]
    finally:
        pool.migration.rule = None
    pool.check_integrity()
    assert short.summary.engine_id == 0 and pool.migration.num_moved >= 1 and pool.num_reissued == 0
    assert 1 in {scored.summary.engine_id for scored in long}
    for scored in long:
        columns = joined(ray.get(list(scored.columns)))
        assert not scored.summary.is_unfinished
        for sample, length in enumerate(scored.summary.lengths):
            spans = scored.summary.weight_spans[sample]
            assert [(span.weight_version, span.num_tokens) for span in spans] == [(published.version, length)]
            ids = [*scored.group.prompt.token_ids.tolist(), *columns.response(sample).tolist()]
            forced = ray.get(published.engines.actors[0].probe.remote(ids))[-length:]
            assert np.abs(np.array(forced) - columns.logprobs(sample)).mean() < 0.02


def test_the_same_version_twice_is_refused_and_nothing_changes(published):
    before = probed(published)
    with pytest.raises(RuntimeError, match=r"engine 0.*version"):
        published.publisher().publish(published.version)
    assert [state.status for state in published.states()] == [EngineStatus.SERVING] * 2
    np.testing.assert_array_equal(probed(published), before)


def test_a_publish_that_stopped_before_it_was_proven_can_be_made_again(published, monkeypatch):
    """As when another engine dies in the middle of it."""
    publisher = published.publisher()

    def died(version, expected):
        raise RuntimeError("engine 7: probe failed")

    monkeypatch.setattr(publisher, "_prove", died)
    with pytest.raises(RuntimeError, match="engine 7"):
        published.publish(publisher)
    assert [state.status for state in published.states()] == [EngineStatus.APPLYING] * 2
    monkeypatch.undo()
    assert publisher.publish(published.version).weight_version == published.version
    assert [state.status for state in published.states()] == [EngineStatus.SERVING] * 2


def test_engines_that_fail_the_probe_are_fenced_and_the_next_publish_heals_them(published):
    with pytest.raises(RuntimeError, match=r"engine\(s\) \[0, 1\] are fenced.*probe_max_logprob_gap"):
        published.publish(published.publisher(max_probe_gap=0.0))
    assert [state.status for state in published.states()] == [EngineStatus.FENCED] * 2
    waiting, _ = published.begin_on(0, published.groups(1)[0])
    ready, _ = ray.wait([waiting], timeout=1)
    assert not ready
    published.publish()
    summary = ray.get(waiting, timeout=DEADLINE_S)
    assert summary.oldest_version == published.version


@pytest.mark.parametrize("transport", ["gloo", "hand over"])
def test_a_publish_by_another_transport_reaches_both_engines(published, transport):
    before = probed(published)
    learn(published, taken(published, published.groups(4)))
    published.publish(published.publisher(transport))
    after = probed(published)
    np.testing.assert_array_equal(*after)
    assert np.abs(after - before).max() > 0
    published.publish()
    np.testing.assert_array_equal(probed(published), after)


def test_strangers_at_the_publish_stores_change_nothing(published, monkeypatch):
    before, open_stores, heard = probed(published), published.trainer.open_stores, []
    with ExitStack() as stack:

        def open_beside_strangers(first_rank, num_engines):
            addresses = open_stores(first_rank, num_engines)
            heard.extend(stack.enter_context(knocking(address)) for address in addresses)
            return addresses

        monkeypatch.setattr(published.trainer, "open_stores", open_beside_strangers)
        published.publish(published.publisher("gloo"))
    assert [set(of_store) for of_store in heard] == [{b""}] * 2
    np.testing.assert_array_equal(probed(published), before)
    published.publish(published.publisher())


def test_equal_seeds_give_equal_samples_on_either_engine(published):
    (group,) = published.groups(1)
    (_, first), (_, second) = published.sample_on(0, group), published.sample_on(1, group)
    np.testing.assert_array_equal(first.response_ids, second.response_ids)
    np.testing.assert_array_equal(first.rollout_logprobs, second.rollout_logprobs)


@ray.remote(num_cpus=0)
def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_workers_of_a_local_ray_are_no_nicer_than_we_are(running) -> None:
    assert ray.get(niceness.remote()) == os.getpriority(os.PRIO_PROCESS, 0)
