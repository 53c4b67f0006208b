"""Every message of the troubleshooting page is a message of the sources."""

import re

from tests.docs.pages import DOCS, ROOT

PACKAGES = ("history", "rollout", "megatron_rl", "launcher")


def test_every_message_of_the_page_is_in_the_sources() -> None:
    page = (DOCS / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    sources = "".join(path.read_text(encoding="utf-8") for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)  # strings over several lines
    assert len(messages) > 20
    assert [message for message in messages if message not in joined] == []
