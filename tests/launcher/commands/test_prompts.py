"""Training prompts of a run."""

from typing import ClassVar

import numpy as np
import pytest
import ray

from launcher.commands.prompts import load_training_prompts
from rollout.config import DataConfig, DatasetConfig
from rollout.data.prompts import LoadedPrompts
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


class TextActor:
    load_prompts = Loading()


def test_a_step_with_more_prompts_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda values: values)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    config = DataConfig(train=(DatasetConfig(path="few.jsonl"),))
    assert len(load_training_prompts(TextActor(), config, groups_per_step=3).by_id()) == 3
    with pytest.raises(ValueError, match=r"a step may sample 4 groups .*of 3 prompts"):
        load_training_prompts(TextActor(), config, groups_per_step=4)
