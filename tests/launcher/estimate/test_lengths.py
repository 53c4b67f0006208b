import json
from pathlib import Path

import numpy as np
import pytest

from history.store.traces import Trace, write_traces
from launcher.errors import ConfigError
from launcher.estimate.lengths import recorded_lengths, stated_lengths


@pytest.mark.parametrize(("response", "longest"), [(100, 100), (500, 1000), (5000, 20480), (200, 20480)])
def test_stated_lengths_have_the_stated_mean_and_longest_response(response: float, longest: float) -> None:
    lengths = stated_lengths(prompt=7, response=response, longest=longest, tokens_per_forward=1)
    assert lengths.response == pytest.approx(response, rel=0.02)
    assert 0.85 * longest <= lengths.longest <= longest
    assert (np.diff(lengths.responses) >= 0).all()
    assert lengths.of(64).mean() == pytest.approx(response, rel=0.1)


def test_impossible_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--response-tokens = 11 must be above 0 and at most .* 10 tokens"):
        stated_lengths(prompt=1, response=11, longest=10, tokens_per_forward=1)
    with pytest.raises(ConfigError, match=r"--tokens-per-forward = 0.5 is below 1"):
        stated_lengths(prompt=1, response=5, longest=10, tokens_per_forward=0.5)


def test_recent_steps_of_a_run_give_lengths_and_tokens_of_a_forward(tmp_path: Path) -> None:
    rows = [
        {
            "response_length/mean": 100.0 if step < 5 else 300.0,
            "response_length/max": 1000.0,
            "prompt_length/mean": 40.0,
            # steps 12 and 13 were sampled ahead; 0 is what earlier versions wrote
            **({} if step == 12 else {"history/tokens_per_forward": 0.0 if step == 13 else 2.0}),
        }
        for step in range(15)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in (tmp_path, tmp_path / "metrics.jsonl"):
        lengths = recorded_lengths(path)
        assert (lengths.prompt, lengths.tokens_per_forward) == (40.0, 2.0)
        assert lengths.response == pytest.approx(300, rel=0.02)
        assert "last 10 steps" in lengths.source


def test_traces_give_every_length(tmp_path: Path) -> None:
    sizes = [5, 80, 20, 1]
    traces = [
        Trace(
            step=0,
            prompt_id="p",
            sample=number,
            prompt_ids=np.zeros(10, np.int32),
            response_ids=np.zeros(size, np.int32),
            reward=0.0,
        )
        for number, size in enumerate(sizes)
    ]
    write_traces(tmp_path / "step-0.jsonl", traces)
    lengths = recorded_lengths(tmp_path)
    assert lengths.prompt == 10
    assert lengths.of(4).tolist() == [1, 5, 20, 80]
    with pytest.raises(ConfigError, match="no run directory, metrics or traces"):
        recorded_lengths(tmp_path / "nowhere")
