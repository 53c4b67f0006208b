"""Checks of the doctor, each with a planted fault: a fault turns its line red and names the fix."""

import json
import os
import threading
import unicodedata
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from launcher.checks.health.health_check import HealthCheck
from launcher.checks.health.network import network_line
from launcher.checks.health.reward import reward_line
from launcher.checks.health.stop_tokens import stop_token_line
from launcher.checks.health.tokenizer import tokenizer_line
from launcher.checks.health.wandb import KEYS, PLACES, job_problems, wandb_line
from launcher.checks.health.write_speed import FILES_PER_RANK, write_speed, write_speed_line
from launcher.cluster.pairs import Endpoint
from launcher.cluster.ports import free_ports
from launcher.config.schema import WandbConfig
from launcher.config.slurm import SlurmConfig
from rollout.config import RewardConfig
from rollout.data.rows import PromptRow
from rollout.data.tokenizer import Tokenizer
from tests.support.byte_tokenizer import CHAT_TEMPLATE, tokenizer_in, write_byte_tokenizer
from tests.support.deadline import DEADLINE_S

ROWS = [PromptRow(where="train.jsonl, line 1", prompt="1 + 1", data_source="", ground_truth="2", extra_info_json="{}")]
EOS = 256
"""`<|end|>` of the byte tokenizer."""
OTHER_TEMPLATE = CHAT_TEMPLATE.replace("<|end|>", "<|im_end|>")
DEAF_TEMPLATE = "<|user|>hello<|end|>{% if add_generation_prompt %}<|assistant|>{% endif %}"


def tokenizer(directory: Path, template: str = CHAT_TEMPLATE) -> Tokenizer:
    write_byte_tokenizer(directory, chat_template=template)
    return tokenizer_in(directory)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (CHAT_TEMPLATE, ""),
        (OTHER_TEMPLATE, "the chat template writes <|im_end|>, which is 10 tokens and not one"),
        (DEAF_TEMPLATE, "train.jsonl, line 1: the chat template drops the text of a message"),
    ],
)
def test_a_wrong_template_is_found_by_the_tokenizer_line_alone(tmp_path: Path, template: str, problem: str) -> None:
    loaded = tokenizer(tmp_path, template)
    _, problems = tokenizer_line(loaded, ROWS)
    assert [text[: len(problem)] for text in problems] == ([problem] if problem else [])
    assert stop_token_line(loaded, loaded.facts(), [EOS], 260)[1] == []


def test_text_that_holds_a_special_token_is_named_with_it(tmp_path: Path) -> None:
    row = replace(ROWS[0], prompt="what does <|system|> mean?")
    _, (problem,) = tokenizer_line(tokenizer(tmp_path), [row])
    assert problem.startswith(
        "train.jsonl, line 1: the text holds <|system|>, which the model reads as a special token"
    )


@pytest.mark.parametrize(("normalizer", "problem"), [("NFC", ""), ("Lowercase", "text changes by encoding")])
def test_text_in_another_form_of_unicode_is_the_same_text(tmp_path: Path, normalizer: str, problem: str) -> None:
    write_byte_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**settings, "normalizer": {"type": normalizer}}))
    prompt = unicodedata.normalize("NFD", "Is x ≠ y? Định lý của Poincaré")
    assert prompt != unicodedata.normalize("NFC", prompt)
    _, problems = tokenizer_line(tokenizer_in(tmp_path), [replace(ROWS[0], prompt=prompt)])
    assert [problem in found for found in problems] == ([True] if problem else [])


@pytest.mark.parametrize(
    ("ids", "vocab_size", "problem"),
    [
        ([EOS], 260, ""),
        ([EOS, 700], 260, "stop token 700 is beyond the model's 260 tokens"),
    ],
)
def test_stop_tokens_of_the_engine_are_compared(tmp_path: Path, ids: list[int], vocab_size: int, problem: str) -> None:
    loaded = tokenizer(tmp_path)
    _, problems = stop_token_line(loaded, loaded.facts(), ids, vocab_size)
    assert [text[: len(problem)] for text in problems] == ([problem] if problem else [])


def test_an_engine_that_stops_elsewhere_is_named_with_both_tokens(tmp_path: Path) -> None:
    loaded = tokenizer(tmp_path)
    _, problems = stop_token_line(loaded, loaded.facts(), [5], 260)
    assert problems[0].startswith("the tokenizer's end of sequence is 256, engines stop at [5]")
    assert problems[1].startswith("the chat template ends an answer with token 256")


def test_the_reward_of_a_sample_is_shown_and_a_broken_function_is_red() -> None:
    value, problems = reward_line(RewardConfig(), ROWS)
    assert (value, problems) == ("mean of 1 rows: ground truth 1.00, empty text 0.00", [])
    broken = RewardConfig(function="tests.support.reward_functions.broken")
    check = HealthCheck(name="reward", measure=lambda: reward_line(broken, ROWS)).run()
    assert check.problem


def test_a_slow_disk_is_judged_by_the_time_between_checkpoints(tmp_path: Path) -> None:
    assert write_speed(tmp_path, 3, 1 << 20) > 0 and list(tmp_path.iterdir()) == []
    for background, share in ((False, 0.2), (True, 0.8)):
        line = partial(write_speed_line, 1e6, 10**7, share=1.0, background=background)  # a save takes 10 s
        assert line(interval_s=None, timeout_s=60.0)[1] == []
        assert line(interval_s=10 / share + 1, timeout_s=60.0)[1] == []
        assert f"a save may take {share:.0%} of that" in line(interval_s=10 / share - 1, timeout_s=60.0)[1][0]
        assert "`trainer.timeout_s` = 9 s" in line(interval_s=None, timeout_s=9.0)[1][0]


def test_a_node_is_judged_by_its_part_of_a_checkpoint() -> None:
    """459 GB from 16 nodes at 200 MB/s each take 143 s; one node would take 2,295 s."""
    line = partial(write_speed_line, 200e6, 459 * 10**9, interval_s=None, timeout_s=1800.0, background=True)
    value, problems = line(share=1 / 16)
    assert problems == []
    assert value == "200 MB/s, one node's 6.2% of a checkpoint of about 459000 MB takes 143.4 s"
    value, problems = line(share=1.0)
    assert value == "200 MB/s, a checkpoint of about 459000 MB takes 2295.0 s"
    assert "`trainer.timeout_s` = 1800 s" in problems[0]


def test_all_files_of_a_node_are_open_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits with its bytes written until all have come so far."""
    together, synced = threading.Barrier(4), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (together.wait(DEADLINE_S), synced(file)))
    assert write_speed(tmp_path, 4, 1 << 20) > 0


def test_as_many_files_are_measured_as_a_checkpoint_has() -> None:
    source = (Path(__file__).parents[4] / "megatron_rl/checkpoints/writer.py").read_text()
    assert f"\nFILES_PER_RANK = {FILES_PER_RANK}\n" in source


def wandb_problems(home: Path, mode: str = "online", *, is_installed: bool = True, **environment: str) -> list[str]:
    config = WandbConfig.model_validate({"mode": mode})
    return wandb_line(config, environment=environment, home=home, is_installed=is_installed)[1]


def test_wandb_needs_its_package_and_online_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    problems = partial(wandb_problems, tmp_path)
    assert problems("offline") == problems("disabled", is_installed=False) == []
    assert problems(WANDB_API_KEY="key") == problems(WANDB_IDENTITY_TOKEN_FILE="token") == []
    assert problems("offline", is_installed=False)[0].startswith("the package wandb is missing")
    assert problems(WANDB_API_KEY="")[0].startswith("no key; set WANDB_API_KEY")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    assert problems() == []


@pytest.mark.parametrize(
    ("files", "environment"),
    [
        ({".netrc": "machine api.forge.coreweave.com login user password key"}, {}),
        ({"_netrc": "machine api.wandb.ai login user password key"}, {}),
        ({"keys": "machine api.wandb.ai login user password key"}, {"NETRC": "keys"}),
        ({".netrc": "machine wandb.mine login user password key"}, {"WANDB_BASE_URL": "https://wandb.mine"}),
        (
            {
                ".netrc": "machine wandb.mine login user password key",
                ".config/wandb/settings": "[default]\nbase_url = https://wandb.mine",
            },
            {},
        ),
        ({"wandb/settings": "[default]\napi_key = key"}, {}),
    ],
)
def test_a_key_is_found_wherever_wandb_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], environment: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert wandb_problems(tmp_path, **environment), "before there is one"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert wandb_problems(tmp_path, **environment) == []


def test_a_key_of_another_server_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".netrc").write_text("machine wandb.mine login user password key\n")
    assert wandb_problems(tmp_path) and wandb_problems(tmp_path, WANDB_BASE_URL="https://wandb.other:8080/x")


def test_a_job_is_refused_only_if_no_key_can_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**settings: object) -> tuple[list[str], list[str]]:
        return job_problems(WandbConfig(mode="online"), SlurmConfig.model_validate(settings))

    for name in (*KEYS, *PLACES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    problems, warnings = found()
    assert problems[0].startswith("`wandb.mode` = online: no key; set WANDB_API_KEY") and warnings == []
    for brought in (
        {"modules": ("wandb",)},
        {"template": "mine.sh"},
        {"extra": ("--export-file=keys",)},
        {"container": {"kind": "pyxis", "image": "ours"}},
    ):
        assert found(**brought) == ([], [])
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert found(environment=("WANDB_API_KEY",)) == ([], [])
    problems, (warning,) = found()
    assert problems == [] and warning.endswith("name WANDB_API_KEY in `cluster.slurm.environment`")
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    assert found() == ([], [])


def test_a_blocked_port_and_a_silent_node_are_named(tmp_path: Path) -> None:
    here = Endpoint(node="n1", address="127.0.0.1", port=free_ports(3).probe)
    assert network_line(tmp_path / "alone", here, ["n1"])[1] == []
    folder = tmp_path / "pair"
    folder.mkdir()
    (folder / "n2.address").write_text("127.0.0.1 1\n")  # nothing listens there
    (folder / "n2.done").write_text("n1\nn2\n")  # it has waited for n1
    assert network_line(folder, here, ["n1", "n2"])[1][0].startswith("n1 cannot connect to n2; open the network")


def test_an_error_of_a_check_is_its_red_line(tmp_path: Path) -> None:
    def full() -> tuple[str, list[str]]:
        raise OSError(28, "No space left on device")

    line = str(HealthCheck(name="write speed", measure=full).run())
    assert "cannot be checked - OSError" in line and "No space left on device" in line
    unimportable = RewardConfig(function="tests.support.runs.unimportable_reward.compute_score")
    reward = HealthCheck(name="reward", measure=lambda: reward_line(unimportable, ROWS)).run()
    assert "importing its module failed: KeyError: 'wrong'" in reward.problem
