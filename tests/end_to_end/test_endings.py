"""Real commands that end other than well: exit code, one screen, the log, and nothing left running."""

import pytest

from launcher.endings.screen import WIDTH


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("import", 6, ["the reward function is broken", "tests.support.runs.unimportable_reward", "KeyError: 'wrong'"]),
        ("every sample", 6, ["the reward function is broken", "for each of the first 16 responses", "scorer 0"]),
        ("disk", 7, ["the disk is full", "No space left on device"]),
    ],
)
def test_what_a_person_can_mend_ends_in_one_screen_without_traceback(ended, name, code, said):
    one = ended[name]
    lines = one.error.splitlines()
    text = " ".join(one.error.split())
    assert one.code == code, one.error
    assert all(part in text for part in said), text
    assert "Traceback" not in one.error and len(lines) <= 25
    # a path of the test's own may be longer than a line
    assert all(len(line) <= WIDTH or " " not in line.strip().removeprefix("log").strip() for line in lines), lines
    assert f"{one.log} (full traceback)" in text
    assert "Traceback" in one.log.read_text()


def test_a_defect_shows_its_traceback_once_and_the_screen_after_it(ended):
    one = ended["defect"]
    assert one.code == 70
    assert one.error.count("Traceback") == 1
    assert one.error.index("ZeroDivisionError") < one.error.index("a defect of megatron-rl")
    assert "ZeroDivisionError" in one.log.read_text()


@pytest.mark.parametrize("early", ["", " early"])
@pytest.mark.parametrize(("name", "code"), [("interrupted", 130), ("terminated", 143)])
def test_a_signal_ends_everything_and_says_one_line(ended, name, code, early):
    one = ended[name + early]
    assert (one.code, one.orphans) == (code, [])
    assert one.error.splitlines() == [f"megatron-rl sft: {name}; kept: nothing. The same command begins anew."]
