"""Real commands that end other than well: exit code, one screen, the log, and nothing left running."""

import pytest

from launcher.endings.screen import WIDTH

OF_RAY = ("Ray is started again", "so its processes are killed")
"""Ends of lines that say that Ray was late, as on a busy machine. They change no ending."""


def printed(end) -> list[str]:
    """Lines of standard error, without those about Ray."""
    return [line for line in end.error.splitlines() if not line.endswith(OF_RAY)]


@pytest.mark.parametrize(
    ("name", "code", "parts"),
    [
        ("import", 6, ["the reward function is broken", "tests.support.runs.unimportable_reward", "KeyError: 'wrong'"]),
        ("every sample", 6, ["the reward function is broken", "for each of the first 16 responses", "scorer 0"]),
        ("disk", 7, ["the disk is full or cannot be written", "No space left on device"]),
    ],
)
def test_what_a_person_can_mend_ends_in_one_screen_without_traceback(ended, name, code, parts):
    end = ended[name]
    lines = printed(end)
    text = " ".join(end.error.split())
    assert end.code == code, end.error
    assert all(part in text for part in parts), text
    assert "Traceback" not in end.error and len(lines) <= 25
    # a path of the test's own may be longer than a line
    assert all(len(line) <= WIDTH or " " not in line.strip().removeprefix("log").strip() for line in lines), lines
    assert f"{end.log} (full traceback)" in text
    assert "Traceback" in end.log.read_text()


def test_a_defect_shows_its_traceback_once_and_the_screen_after_it(ended):
    end = ended["defect"]
    assert end.code == 70
    assert end.error.count("Traceback") == 1
    assert end.error.index("ZeroDivisionError") < end.error.index("a defect of megatron-rl")
    assert "ZeroDivisionError" in end.log.read_text()


@pytest.mark.parametrize(("name", "code"), [("interrupted", 130), ("terminated early", 143)])
def test_a_signal_ends_everything_and_prints_one_line(ended, name, code):
    """Ctrl-C while the trainer works, and SIGTERM while Ray starts."""
    end, (word, *_) = ended[name], name.split()
    assert (end.code, end.orphans) == (code, [])
    assert printed(end) == [f"megatron-rl sft: {word}; kept: nothing. The same command begins anew."]
