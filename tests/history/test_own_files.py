"""Links of other users are refused, links of one's own and of root are followed, and nothing waits for a pipe."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from history import own_files
from history.own_files import PlantedError, is_private_folder, make_private_folder, open_own, opener

STRANGER = 12345
"""User id of nobody."""


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Make a path another user's. Without root's rights this process becomes another user in its own eyes."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: STRANGER)

    return give


def link(at: Path, to: Path) -> Path:
    at.symlink_to(to)
    return at


def write(path: Path, mode: str = "w") -> None:
    with open(path, mode, opener=opener) as file:
        file.write("new")


@pytest.mark.parametrize("mode", ["w", "a", "r+"])
def test_a_link_of_another_user_is_not_written_through(tmp_path: Path, mode: str, give_away) -> None:
    target = tmp_path / "target"
    target.write_text("old")
    planted = link(tmp_path / "metrics.jsonl", target)
    give_away(planted)
    with pytest.raises(PlantedError, match=r"metrics.jsonl is a link that .+ made; .* Remove it, or make it yourself"):
        write(planted, mode)
    assert target.read_text() == "old"


def test_a_link_of_another_user_to_no_file_creates_none(tmp_path: Path, give_away) -> None:
    planted = link(tmp_path / "metrics.jsonl.partial", tmp_path / "authorized_keys")
    give_away(planted)
    with pytest.raises(PlantedError):
        write(planted)
    assert not (tmp_path / "authorized_keys").exists()


def test_own_links_and_those_of_root_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = link(tmp_path / "metrics.jsonl", tmp_path / "elsewhere")
    write(own, "a")
    assert (tmp_path / "elsewhere").read_text() == "new"
    if os.geteuid() == 0:  # the link is root's
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
        write(own, "a")
        assert (tmp_path / "elsewhere").read_text() == "newnew"


@pytest.mark.parametrize(("mode", "is_refused"), [(0o775, False), (0o777, True), (0o1777, False)])
def test_a_link_where_every_user_may_replace_it_is_refused(tmp_path: Path, mode: int, is_refused: bool) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    planted = link(folder / "a", tmp_path / "b")
    folder.chmod(mode)
    if is_refused:
        with pytest.raises(PlantedError, match=rf"to which every user may write; run `chmod o-w {folder}`"):
            write(planted)
    else:
        write(planted)
    assert (tmp_path / "b").exists() is not is_refused


@pytest.mark.parametrize("mode", ["w", "a", "r"])
def test_nothing_waits_for_the_other_end_of_a_pipe(tmp_path: Path, mode: str) -> None:
    os.mkfifo(tmp_path / "stop.json")
    with pytest.raises(PlantedError, match=r"stop.json is a pipe"):
        open(tmp_path / "stop.json", mode, opener=opener).close()


def test_a_new_file_has_the_mode_of_other_new_files(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "b").write_text("new")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_all_links_below_a_directory_are_looked_at(tmp_path: Path, give_away) -> None:
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    (run / "checkpoints").mkdir(parents=True)
    (scratch / "7" / "trainer").mkdir(parents=True)
    (run / "samples").symlink_to(scratch)
    link(run / "checkpoints" / "latest", tmp_path)
    link(scratch / "loop", run)
    own_files.refuse_planted_links(run)
    planted = link(scratch / "7" / "trainer" / "common.pt", tmp_path / "evil")
    give_away(planted)
    with pytest.raises(PlantedError, match=r"(common\.pt|samples|latest|loop) is a link that"):
        own_files.refuse_planted_links(run)


def test_a_file_of_another_user_is_not_opened_as_ones_own(tmp_path: Path, give_away) -> None:
    path = tmp_path / "a"
    path.write_text("a")
    descriptor = open_own(path)
    assert descriptor is not None
    os.close(descriptor)
    assert open_own(link(tmp_path / "own link", path)) is None
    assert open_own(tmp_path) is None
    give_away(path)
    assert open_own(path) is None
    with pytest.raises(FileNotFoundError):
        open_own(tmp_path / "none")


def test_a_private_folder_is_made_once_and_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        make_private_folder(tmp_path / "a")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["link", "open to others", "another user's"])
def test_a_planted_folder_is_not_taken(tmp_path: Path, kind: str, give_away) -> None:
    path = tmp_path / "mrl-history-run-1"
    if kind == "link":
        (tmp_path / "mine").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "mine")
    else:
        path.mkdir(mode=0o700)
        path.chmod(0o722 if kind == "open to others" else 0o700)
    if kind == "another user's":
        give_away(path)
    assert not is_private_folder(path)
    with pytest.raises(PlantedError, match="is a link, or another user made it or can write to it; remove it"):
        make_private_folder(path)
