"""The process that checks arguments of vLLM's engine."""

import io
import json

import pytest

from rollout.engine.argument_check import main


def test_each_wrong_key_of_the_table_is_one_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"block_siz": 32, "seed": 1, "block_size": 32}'))
    assert main() == 0
    unknown, ours = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert unknown == "engine.vllm.block_siz is no argument of vLLM's engine; did you mean 'block_size'?"
    assert ours == "engine.vllm.seed is set by this program; use seed"
