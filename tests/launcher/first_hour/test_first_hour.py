"""The runner of the first hour on a GPU, with stages that need none."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from launcher.first_hour import device, page, runner
from launcher.first_hour.results import ALL, Counts, Result, read, read_all, read_junit
from launcher.first_hour.runner import FirstHour, digest
from launcher.first_hour.shares import SHARES, read_shares, shares, write_shares
from launcher.first_hour.stages import STAGES, Stage
from tests.docs.pages import ROOT
from tests.support.deadline import DEADLINE_S
from tests.support.first_hour_call import DEVICE, script

COUNTING = """
    import pathlib
    path = pathlib.Path("count")
    path.write_text(path.read_text() + "x" if path.exists() else "x")
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with a file of code."""
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "a.py").write_text("A = 1\n")
    return tmp_path


def run(
    stages: list[Stage],
    folder: Path,
    *,
    root: Path,
    minutes: float,
    say: Callable[[str], None],
    only: list[str] | None = None,
    num_beside: int = 1,
) -> list[Result]:
    hour = FirstHour(stages=stages, folder=folder, root=root, num_beside=num_beside, say=say)
    return hour.run(minutes=minutes, only=only)


def outcomes(results: list[Result]) -> dict[str, str]:
    return {result.stage: result.outcome for result in results}


def test_stages_that_have_passed_are_not_run_again_unless_the_code_has_changed(root: Path) -> None:
    stages = [DEVICE, script("counting", COUNTING)]

    def count(**more: list[str]) -> int:
        assert outcomes(run(stages, root / "out", root=root, minutes=5, say=[].append, **more)) == {
            "device": "passed",
            "counting": "passed",
        }
        return len((root / "count").read_text())

    assert [count(), count(), count(only=["counting"])] == [1, 1, 2]
    (root / "rollout" / "a.py").write_text("A = 2\n")
    assert [count(), count()] == [3, 3]
    assert read(root / "out" / "counting.json").device == "H100"
    assert [result.stage for result in read_all(root / "out" / ALL)] == ["device", "counting"]


def test_stages_that_have_passed_are_run_again_with_other_packages_and_another_driver(root: Path) -> None:
    versions = {"vllm": "0.25.1", "driver": "580.95.05"}
    found = []
    for changed in ({}, {}, {"vllm": "0.26.0"}, {"vllm": "0.26.0"}, {"driver": "590.10"}, {"flash-attn": "2.8.3"}):
        versions |= changed
        record = json.dumps({"facts": {"name": "H100", "free_bytes": len(found)}, "versions": versions})
        described = script("device", f"import sys; open(sys.argv[1], 'w').write({record!r})")
        results = run([described, script("counting", COUNTING)], root / "out", root=root, minutes=5, say=[].append)
        assert [result.versions for result in results] == [versions] * 2
        found.append(len((root / "count").read_text()))
    assert found == [1, 1, 2, 2, 3, 4]
    assert read_all(root / "out" / ALL)[1].versions == versions


def test_a_call_with_chosen_stages_keeps_the_results_of_the_others(root: Path) -> None:
    stages = [DEVICE, script("one", "pass"), script("two", COUNTING)]
    run(stages, root / "out", root=root, minutes=5, say=[].append)
    again = run(stages, root / "out", root=root, minutes=5, only=["two"], say=[].append)
    assert outcomes(again) == {"device": "passed", "two": "passed"} and (root / "count").read_text() == "xx"
    assert [result.stage for result in read_all(root / "out" / ALL)] == ["device", "one", "two"]


def test_a_stage_that_fails_is_told_with_the_end_of_its_log_and_run_again_by_the_next_call(root: Path) -> None:
    said: list[str] = []
    stages = [DEVICE, script("failing", "raise SystemExit('no kernel image')"), script("after", "pass")]
    for _ in range(2):
        results = run(stages, root / "out", root=root, minutes=5, say=said.append)
        assert outcomes(results) == {"device": "passed", "failing": "failed", "after": "passed"}
        assert results[1].fault == "exit code 1; no kernel image"
    assert [line.partition(" after ")[0] for line in said if line.startswith("failing")] == ["failing: failed"] * 2


ENOUGH_S = (2.0, 10.0, 50.0, 250.0)
"""Tried one after another, until a busy machine has started a process within them."""


def test_a_stage_that_hangs_is_ended_with_what_it_has_started(root: Path) -> None:
    hanging = """
        import subprocess, sys, time
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open("child", "w").write(str(child.pid))
        time.sleep(1000)
    """
    for limit_s in ENOUGH_S:
        stages = [DEVICE, script("hanging", hanging, limit_s=limit_s)]
        results = run(stages, root / "out", root=root, minutes=DEADLINE_S / 60, say=[].append)
        assert outcomes(results)["hanging"] == "out of time"
        if (root / "child").exists():
            break
    child = int((root / "child").read_text())
    deadline = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("sleeping", ["first", "beside"])
def test_a_call_that_gets_a_signal_ends_its_stages_and_what_they_have_started(
    root: Path, sent: signal.Signals, sleeping: str
) -> None:
    for folder in ("tests", "benchmarks"):
        (root / folder).mkdir()
    call = subprocess.Popen(
        [sys.executable, "-m", "tests.support.first_hour_call", sleeping],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    names = ["device"] if sleeping == "first" else ["one", "two"]
    deadline = time.monotonic() + DEADLINE_S
    family: list[int] = []
    try:
        while not all((root / name).exists() for name in names):
            assert call.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        family = [int(number) for name in names for number in (root / name).read_text().split()]
        assert len(family) == 2 * len(names) and all(is_alive(process) for process in family)
        call.send_signal(sent)
        said, faults = call.communicate(timeout=DEADLINE_S)
        while any(is_alive(process) for process in family):
            assert time.monotonic() < deadline + DEADLINE_S
            time.sleep(0.05)
    finally:
        call.kill()
        for process in filter(is_alive, family):
            os.kill(process, signal.SIGKILL)
    code, word = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}[sent]
    assert (call.returncode, faults) == (code, f"{word}: the stages were ended; the same command goes on from here\n")
    assert not (root / "three").exists() and "failed" not in said
    assert not any((root / "out" / f"{name}.json").exists() for name in names)


def test_what_does_not_fit_into_the_minutes_is_left_for_another_call(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MIN_S", 1.0)
    slow = script("slow", "import time; time.sleep(1000)", limit_s=1000.0)
    for enough_s in ENOUGH_S:
        said: list[str] = []
        stages = [DEVICE, slow, script("left", "pass")]
        results = run(stages, root / "out", root=root, minutes=(1 + enough_s) / 60, say=said.append)
        if "slow" in outcomes(results):
            break
    assert outcomes(results) == {"device": "passed", "slow": "out of time"}
    assert "left: not begun" in said[-1] and "goes on from here" in said[-1]


def test_stages_that_may_run_beside_others_do_and_those_that_measure_run_alone(root: Path) -> None:
    meeting = """
        import pathlib, time
        own, other = {names}
        pathlib.Path(own).touch()
        deadline = time.monotonic() + 60
        while not pathlib.Path(other).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    """
    alone = "import pathlib; assert pathlib.Path('a').exists() and pathlib.Path('b').exists()"
    stages = [
        DEVICE,
        script("one", meeting.format(names=("a", "b")), limit_s=DEADLINE_S, beside=True),
        script("two", meeting.format(names=("b", "a")), limit_s=DEADLINE_S, beside=True),
        script("measures", alone),
    ]
    results = run(stages, root / "out", root=root, minutes=5, num_beside=2, say=[].append)
    assert [(each.stage, each.outcome) for each in results] == [
        (name, "passed") for name in ("device", "one", "two", "measures")
    ]
    assert [result.stage for result in read_all(root / "out" / ALL)] == ["device", "one", "two", "measures"]


def test_without_a_device_nothing_else_is_run(root: Path) -> None:
    none = script("device", "raise SystemExit('there is no CUDA device')")
    results = run([none, script("counting", COUNTING)], root / "out", root=root, minutes=5, say=[].append)
    assert outcomes(results) == {"device": "failed"} and not (root / "count").exists()


def test_results_of_pytest_are_counted_and_failures_keep_the_begin_of_their_message(root: Path) -> None:
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu: x"]\n')
    (root / "test_it.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2, 'the sums differ'\n"
        "@pytest.mark.skip(reason='needs two devices')\ndef test_of_two(): pass\n"
        "@pytest.fixture\ndef broken(): raise OSError('no engine')\n"
        "def test_that_cannot_begin(broken): pass\n"
    )
    stage = Stage(name="tests", decides="?", limit_s=DEADLINE_S, tests=("test_it.py",))
    result = run([DEVICE, stage], root / "out", root=root, minutes=10, say=[].append)[1]
    assert result.outcome == "failed" and result.tests is not None
    assert result.tests.passed == 1
    assert {name.rpartition("::")[2] for name in result.tests.failed} == {"test_bad", "test_that_cannot_begin"}
    assert "the sums differ" in result.tests.failed["test_it::test_bad"]
    assert "needs two devices" in result.tests.skipped["test_it::test_of_two"]
    assert "1 tests passed, 2 failed, 1 skipped" in result.line()
    assert read_junit(root / "nothing.xml") == Counts()


def test_a_stage_of_tests_none_of_which_ran_has_not_passed(root: Path) -> None:
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu: x"]\n')
    (root / "test_it.py").write_text("import pytest\n@pytest.mark.gpu\n@pytest.mark.skip\ndef test_one(): pass\n")
    stage = Stage(name="tests", decides="?", limit_s=DEADLINE_S, tests=("test_it.py",))
    result = run([DEVICE, stage], root / "out", root=root, minutes=10, say=[].append)[1]
    assert (result.outcome, result.fault) == ("failed", "no test has run")


def test_the_digest_follows_names_and_contents(root: Path) -> None:
    first = digest(root)
    (root / "rollout" / "a.py").rename(root / "rollout" / "b.py")
    renamed = digest(root)
    (root / "rollout" / "b.py").write_text("A = 3\n")
    assert len({first, renamed, digest(root)}) == 3


def test_every_stage_has_what_it_runs() -> None:
    assert STAGES[0].module == "launcher.first_hour.device"
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    for stage in STAGES:
        assert bool(stage.tests) != bool(stage.module)
        assert all((ROOT / path).exists() for path in stage.tests), stage.tests
        if stage.module:
            path = ROOT / stage.module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), stage.module


def test_the_device_stage_measures_rates(tmp_path: Path) -> None:
    assert device.main(["--json", str(tmp_path / "device.json"), "--device", "cpu"]) == 0
    found = json.loads((tmp_path / "device.json").read_text())
    assert found["facts"] == {"name": "cpu"}
    installed = found["versions"]
    assert installed["torch"] == version("torch") and installed["megatron-core"] == version("megatron-core")
    assert set(installed) == {"python", "cuda", "driver", *device.PACKAGES}
    assert set(found["rates"]) == {
        *("copy_bytes_s", "host_to_device_bytes_s", "device_to_host_bytes_s", "bf16_flops", "int8_flops")
    }
    assert all(value > 0 for value in found["rates"].values())


def test_the_driver_is_that_of_the_first_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ntest "$*" = "--query-gpu=driver_version --format=csv,noheader" && printf "580.1\\n580.1\\n"'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert device.versions()["driver"] == "580.1"


def test_the_page_shows_stages_and_rates_and_keeps_what_stands_around_them() -> None:
    first = Result(
        stage="device",
        decides="What is it?",
        outcome="passed",
        seconds=9.6,
        began_at="2026-01-01 00:00:00+0000",
        device="some GPU",
        code="",
        record={"facts": {}, "rates": {"copy_bytes_s": 1.5e12, "bf16_flops": 7e14}},
    )
    second = replace(first, stage="kernels", record=None, tests=Counts(passed=3, failed={"a": "b"}), outcome="failed")
    shown = page.with_section(f"a\n{page.BEGIN}\nold\n{page.END}\nz\n", [first, second])
    assert shown.startswith(f"a\n{page.BEGIN}\n") and shown.endswith(f"\n{page.END}\nz\n") and "old" not in shown
    assert "| device | What is it? | passed | 10 | - |" in shown
    assert "| kernels | What is it? | failed | 10 | 3, 1, 0 |" in shown
    assert "| copy | 1500 GB/s |" in shown and "| bf16 | 700 TFLOP/s |" in shown


def test_the_committed_page_shows_the_committed_results() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.with_section(text, read_all(page.RESULTS)) == text, "run `python -m launcher.first_hour.page --write`"


def test_shares_of_a_device_are_what_its_rates_are_of_the_datasheet(tmp_path: Path) -> None:
    rates = {
        "copy_bytes_s": 0.8 * 3.35e12 / 2,
        "host_to_device_bytes_s": 0.9 * 64e9,
        "device_to_host_bytes_s": 0.5 * 64e9,
        "bf16_flops": 0.7 * 989.4e12,
        "int8_flops": 0.1 * 1978.9e12,
        "fp8_flops": 0.6 * 1978.9e12,
    }
    read_s = 15.2e9 / (0.8 * 3.35e12)
    row = {"engine": "stock", "num_rows": 1, "num_context_tokens": 512, "weight_bytes": 15.2e9}
    forwards = [
        {**row, "seconds": read_s + 3e-3},
        {**row, "seconds": read_s / 2 + 2e-3, "weight_bytes": 7.6e9},
        {**row, "seconds": 1e-3, "num_context_tokens": 4096},
        {**row, "seconds": 1e-3, "engine": "drafts"},
    ]
    passed = Result(
        stage="device",
        decides="?",
        outcome="passed",
        seconds=1.0,
        began_at="-",
        device="NVIDIA H100 80GB HBM3",
        code="-",
    )
    results = [replace(passed, record={"rates": rates})]
    write_shares(tmp_path, results)
    without = read_shares(tmp_path / SHARES)
    assert without.forward_overhead_s is None
    found = shares([*results, replace(passed, stage="step_time", record={"rows": forwards})])
    assert found is not None and found.gpu == "h100"
    assert found.product_share == pytest.approx(0.7) and found.eight_bit_product_share == pytest.approx(0.6)
    assert found.bandwidth_share == pytest.approx(0.8) and found.host_share == pytest.approx(0.5)
    assert found.forward_overhead_s == pytest.approx(2e-3)
    assert shares([replace(results[0], device="unknown")]) is None
    assert "--product-share 0.70 --bandwidth-share 0.80" in page.section(results)
