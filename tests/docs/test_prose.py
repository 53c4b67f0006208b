"""The documentation: links resolve, named files exist, every page can be found, sentences are short and plain."""

import re
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, blocks, links, pages, sentences

MAX_WORDS = 40
BANNED = {
    r"^(?:Who|What|Whoever|Whatever) [^?]*$": "name the subject; only a question begins like this",
    r"(?:, |; |: |\band )(?:who|what) (?:then|is|was|has|had|always|still|waits?|knows?|differs)\b": "name the subject",
    r"\bnobody (?:knows|has)\b": "say which process lacks it",
    r"\bof whom\b|\bwhom to\b|\bwhich of them\b": "name the subject",
    r"\bso to say\b|\bas it were\b|\bso far as is known\b": "leave it out",
    r"\b(?:simply|obviously|of course)\b": "leave it out",
}
"""Constructions that had to be read twice, and what to write instead."""
PACKAGES = ("history", "rollout", "megatron_rl", "launcher", "benchmarks", "examples")
FILE = re.compile(rf"`((?:{'|'.join(PACKAGES)}|tests|docs|requirements)/[\w./-]*(?:/|\.\w+))`")
MODULE = re.compile(rf"python -m ((?:{'|'.join(PACKAGES)}|tests)[\w.]*)")
PRODUCED = ("examples/arithmetic/work",)
"""Folders that commands make."""
PAGES = pages()


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def faults(of_page: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    """Findings of a check, by page."""
    return {named(page): found for page in PAGES if (found := of_page(page))}


def test_every_relative_link_resolves() -> None:
    assert faults(lambda page: [target for target in links(page) if not (page.parent / target).exists()]) == {}


def test_every_named_file_and_module_exists() -> None:
    assert faults(absent) == {}


def absent(page: Path) -> list[str]:
    """Files and modules named on a page that neither exist nor are created by its reader."""
    text = page.read_text(encoding="utf-8")
    written = {block.file for block in blocks(page)}
    files = [path for path in FILE.findall(text) if path not in written and not path.startswith(PRODUCED)]
    modules = [name for name in MODULE.findall(text) if not found(name)]
    return [path for path in files if not (ROOT / path).exists()] + modules


def found(module: str) -> bool:
    """Whether `python -m` finds the module, without importing anything."""
    folder = ROOT.joinpath(*module.split("."))
    return (folder / "__main__.py").exists() or PathFinder.find_spec(folder.name, [str(folder.parent)]) is not None


def test_every_page_is_reachable_from_the_index() -> None:
    reached: set[Path] = set()
    waiting = [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.exists():
            reached.add(page)
            waiting += [(page.parent / target).resolve() for target in links(page) if target.endswith(".md")]
    assert {named(page) for page in (*PAGES, *DOCS.rglob("*.md"))} - {named(page) for page in reached} == set()


def test_a_decisions_number_is_that_of_its_file() -> None:
    files = sorted((DOCS / "decisions").glob("0*.md"))
    assert [int(file.name[:4]) for file in files] == list(range(1, len(files) + 1))
    for file in files:
        title, _, status = file.read_text(encoding="utf-8").splitlines()[:3]
        assert title.startswith(f"# {int(file.name[:4])}. ")
        assert re.fullmatch(r"Status: (?:accepted|superseded by \d+)", status)


def test_every_cited_decision_exists() -> None:
    numbers = {int(file.name[:4]) for file in (DOCS / "decisions").glob("0*.md")}
    sources = [*PAGES, *(file for name in PACKAGES for file in (ROOT / name).rglob("*.py"))]
    cited = {
        (named(file), int(number))
        for file in sources
        for number in re.findall(r"\bdecisions? (\d+)", file.read_text(encoding="utf-8"))
    }
    assert {(file, number) for file, number in cited if number not in numbers} == set()


def test_no_sentence_is_longer_than_forty_words() -> None:
    assert faults(lambda page: [text for text in sentences(page) if len(text.split()) > MAX_WORDS]) == {}


def banned(sentence: str) -> Iterator[str]:
    for pattern, advice in BANNED.items():
        for match in re.finditer(pattern, sentence):
            yield f"{match.group()!r}: {advice}"


def test_no_page_has_a_banned_construction() -> None:
    assert faults(lambda page: [fault for text in sentences(page) for fault in banned(text)]) == {}


@pytest.mark.parametrize(
    "text",
    [
        "Who always knew which piece to copy would have 2.62 there.",
        "It is corrected, what then rises along a draft is leveled to the mean.",
        "Nothing is lost, and nobody knows it.",
    ],
)
def test_every_banned_construction_is_detected(text: str) -> None:
    assert list(banned(text)) != []
