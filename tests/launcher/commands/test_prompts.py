"""Training prompts of a run."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import ray

from launcher.commands.prompts import _loaded, load_training_prompts
from rollout.config import DataConfig, DatasetConfig
from rollout.data.prompts import LoadedPrompts
from rollout.pool import heartbeat
from rollout.processes import ProcessId
from rollout.types import Prompt, PromptId


class Loading:
    prompts: ClassVar = tuple(
        Prompt(
            prompt_id=PromptId(f"few/{number}"),
            data_source="few",
            token_ids=np.array([1], dtype=np.int32),
            ground_truth="",
            extra_info_json="null",
        )
        for number in range(3)
    )

    def remote(self, path: str, **options: object) -> LoadedPrompts:
        del path, options
        return LoadedPrompts(name="few", prompts=self.prompts, num_dropped=0, num_truncated=0)


class Alive:
    def remote(self) -> str:
        return "alive"


class TextActor:
    load_prompts = Loading()
    alive = Alive()


def test_a_step_with_more_prompts_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda values: values)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    config = DataConfig(train=(DatasetConfig(path="few.jsonl"),))
    assert len(load_training_prompts(TextActor(), config, groups_per_step=3).by_id()) == 3
    with pytest.raises(ValueError, match=r"a step may sample 4 groups .*of 3 prompts"):
        load_training_prompts(TextActor(), config, groups_per_step=4)


PROCESS = ProcessId(node_id="id", pid=7, created_s=0.0, host="gpu-03")


@dataclass
class FrozenTextActor:
    """Ray and a text actor that loads for a while, then freezes, and loads when its process was ended."""

    answers: bool = True
    ended: list[ProcessId] = field(default_factory=list)

    def wait(self, refs: list[str], *, timeout: float, num_returns: int = 1) -> tuple[list[str], list[str]]:
        done = [ref for ref in refs if (self.answers if ref == "alive" else self.ended)]
        if "alive" in done:
            self.answers = False
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: str | list[str]) -> object:
        return PROCESS if ref == "alive" else ref

    def kill_on_nodes(self, processes: list[ProcessId], *, stacks: bool) -> tuple[str, ...]:
        assert stacks, "it leaves no stacks"
        self.ended += processes
        return ("logs/stacks",)


def test_a_text_actor_that_freezes_while_it_loads_leaves_its_stacks_and_is_restarted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = FrozenTextActor()
    monkeypatch.setattr(ray, "wait", frozen.wait)
    monkeypatch.setattr(ray, "get", frozen.get)
    monkeypatch.setattr(heartbeat, "kill_on_nodes", frozen.kill_on_nodes)
    monkeypatch.setattr(heartbeat, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(heartbeat, "SILENT_S", 0.01)
    assert _loaded(TextActor(), ["file"]) == ("file",)
    assert frozen.ended == [PROCESS]
    assert caplog.messages[0].startswith("the text actor (process 7 on gpu-03) has not answered for 0 s")
    assert caplog.messages[1] == "the stacks of the text actor are in logs/stacks"
