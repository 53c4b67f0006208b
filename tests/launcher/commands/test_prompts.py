"""Training prompts of a run."""

import json
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest
import ray

from launcher.commands import prompts as commands
from launcher.commands.prompts import (
    TrainingPrompts,
    _loaded,
    changed_answers,
    load_evaluation_prompts,
    load_training_prompts,
    training_order,
)
from rollout.config import DataConfig, DatasetConfig, EvalSetConfig
from rollout.data.order import OrderState, PromptOrder
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


def file(*tokens: int) -> LoadedPrompts:
    prompts = tuple(
        replace(Loading.prompts[0], prompt_id=PromptId(f"few/{row}"), token_ids=np.array([token], dtype=np.int32))
        for row, token in enumerate(tokens)
    )
    return LoadedPrompts(name="few", prompts=prompts, num_dropped=0, num_truncated=0)


def test_the_line_of_a_training_file_says_how_many_prompts_repeat_an_earlier_one() -> None:
    assert TrainingPrompts(files=(file(1, 2, 1, 1), file(1, 2))).lines() == [
        "training prompts few: 4, 2 repeat an earlier one; `python -m examples.recipes.convert` keeps one of each",
        "training prompts few: 2",
    ]


def test_an_evaluation_set_that_holds_its_prompts_many_times_is_refused_and_one_with_few_repeats_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(loaded: LoadedPrompts) -> int:
        monkeypatch.setattr(commands, "_loaded", lambda text_actor, loading: (loaded,))
        prompts = load_evaluation_prompts(TextActor(), {"few": EvalSetConfig(path="few.jsonl")}, 9)
        return len(prompts["few"])

    assert load(file(1, 2, 3)) == 3 and caplog.messages == []
    for many in (file(1, 1), file(*range(30), *range(30)), file(*[5] * 32)):
        with pytest.raises(
            ValueError, match=r"evaluation set few: .* of .* prompts repeat .*examples\.recipes\.convert"
        ):
            load(many)
    rubric = file(1, 1)  # rows that the reward function tells apart
    told_apart = [replace(prompt, extra_info_json=str(row)) for row, prompt in enumerate(rubric.prompts)]
    assert load(replace(rubric, prompts=tuple(told_apart))) == 2
    assert "1 of 2 prompts repeat" in caplog.messages[0]
    caplog.clear()
    assert load(file(1, 2, 1)) == 3
    assert caplog.messages[0].startswith("evaluation set few: 1 of 3 prompts repeat an earlier one, so they count more")


def test_a_data_source_with_the_name_of_the_whole_sets_figures_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*sources: str) -> int:
        few = file(*range(len(sources)))
        prompts = [replace(prompt, data_source=source) for prompt, source in zip(few.prompts, sources, strict=True)]
        monkeypatch.setattr(commands, "_loaded", lambda text_actor, loading: (replace(few, prompts=tuple(prompts)),))
        return len(load_evaluation_prompts(TextActor(), {"few": EvalSetConfig(path="few.jsonl")}, 9)["few"])

    with pytest.raises(ValueError, match=r"evaluation set few: one of its 2 data sources is named 'all', .*other name"):
        load("math", "all", "math")
    assert load("math", "code") == 2
    assert load("all", "all") == 2, "its only source has no figures of its own"


def test_a_checkpoint_is_refused_after_a_prompt_of_its_file_was_edited() -> None:
    config = DataConfig(train=(DatasetConfig(path="few.jsonl"),))

    def order(prompts: tuple[Prompt, ...], state: OrderState | None = None) -> PromptOrder:
        file = LoadedPrompts(name="few", prompts=prompts, num_dropped=0, num_truncated=0)
        return training_order(TrainingPrompts(files=(file,)), config, seed=1, state=state)

    first, second, third = Loading.prompts
    started = order((first, second, third))
    draws = started.take(5)
    started.consume(draw.prompt_id for draw in draws)
    corrected = replace(second, ground_truth="another answer")
    assert order((first, corrected, third), started.state()).take(1)[0].position == 5, "answers may be corrected"
    edited = replace(second, token_ids=np.array([2], dtype=np.int32))
    with pytest.raises(ValueError, match=r"other training prompts, .* or with another chat template"):
        order((first, edited, third), started.state())


def test_a_resume_names_the_files_whose_answers_were_edited() -> None:
    """Rewards change with them, and nothing else tells it."""
    config = DataConfig(train=(DatasetConfig(path="few.jsonl"), DatasetConfig(path="more.jsonl")))

    def resumed(state: dict[str, object] | None, **edit: str) -> tuple[PromptOrder, list[str]]:
        more = [replace(prompt, prompt_id=PromptId(f"more/{row}")) for row, prompt in enumerate(Loading.prompts)]
        files = [("few", tuple(Loading.prompts)), ("more", (*more[:-1], replace(more[-1], **edit)))]
        prompts = TrainingPrompts(
            files=tuple(
                LoadedPrompts(name=name, prompts=of_file, num_dropped=0, num_truncated=0) for name, of_file in files
            )
        )
        order = training_order(prompts, config, seed=1, state=None if state is None else OrderState.from_json(state))
        return order, changed_answers(prompts, order)

    order, said = resumed(None)
    state = json.loads(json.dumps(order.state().to_json()))
    assert said == resumed(state)[1] == []
    for edit in ({"ground_truth": "5"}, {"data_source": "other"}, {"extra_info_json": '{"tests": 3}'}):
        order, (line,) = resumed(state, **edit)
        assert line == (
            "changed since the checkpoint: ground truths, data_source or extra_info of training prompts more; "
            "rewards of the steps from here on follow the new ones"
        )
        assert resumed(order.state().to_json(), **edit)[1] == [], "it is said once"
        del (earlier := dict(state))["answers"]
        assert resumed(earlier, **edit)[1] == [], "a checkpoint of an earlier version does not know them"


def test_the_hash_of_answers_tells_where_one_text_ends() -> None:
    def answers(*truths: tuple[str, str]) -> str:
        told = [
            replace(Loading.prompts[0], ground_truth=truth, data_source=source, extra_info_json="null")
            for truth, source in truths
        ]
        return LoadedPrompts(name="few", prompts=tuple(told), num_dropped=0, num_truncated=0).answers()

    assert answers(("é", "b")) == answers(("é", "b"))
    assert len({answers(("ab", "c")), answers(("a", "bc")), answers(("c", "ab")), answers(("ab", "c"), ("", ""))}) == 4


def test_the_hash_of_prompts_tells_where_one_prompt_ends() -> None:
    def contents(*tokens: list[int]) -> str:
        prompts = [replace(Loading.prompts[0], token_ids=np.array(token_ids, dtype=np.int32)) for token_ids in tokens]
        return LoadedPrompts(name="few", prompts=tuple(prompts), num_dropped=0, num_truncated=0).contents()

    assert contents([1, 2], [3]) == contents([1, 2], [3])
    assert len({contents([1, 2], [3]), contents([1], [2, 3]), contents([3], [1, 2]), contents([1, 2, 3])}) == 4


PROCESS = ProcessId(node_id="id", pid=7, start_ticks=0, host="gpu-03")


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
