"""The chat template of a tokenizer, with the arguments of a run: conversations as text.

A template is refused at load if it would give other text at another time, or if it does not read an argument: jinja
ignores such an argument, so a misspelt one would change nothing.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Protocol, TypedDict

CLOCKS = (datetime(2020, 1, 2, 3, 4, 5), datetime(2031, 12, 30, 21, 43, 54))
"""Two times that differ in every part."""
Argument = str | int | float | bool


class ChatMessage(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


class Renderer(Protocol):
    """The members of `transformers`' tokenizers that this file uses."""

    chat_template: str | dict[str, str] | None

    def apply_chat_template(
        self,
        conversation: Sequence[ChatMessage],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **template_arguments: Argument | Callable[[str], str],
    ) -> str:
        """The conversation as text."""


class ChatTemplate:
    """The template of one tokenizer."""

    def __init__(self, renderer: Renderer, arguments: Mapping[str, Argument], *, directory: str) -> None:
        """Check the template of the tokenizer in `directory`; a tokenizer may have none.

        Raises:
            ValueError: there are several templates and none is named `default`, the template writes today's date, or
                an argument is set with every conversation or not read.
        """
        self._renderer = renderer
        self._arguments = arguments
        self._directory = directory
        self.text = self._only_text()
        """Source of the template; empty if there is none."""
        self._refuse_arguments()
        self._refuse_todays_date()

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """A conversation as text, generation prompt included.

        Raises:
            ValueError: there is no chat template, or the template refuses the conversation.
        """
        if not self.text:
            raise ValueError(
                f"the tokenizer in {self._directory} has no chat template; add one, or give prompts as plain text"
            )
        from jinja2 import TemplateError

        try:
            return self._render(messages)
        except TemplateError as error:
            raise ValueError(f"the chat template in {self._directory} refuses the conversation: {error}") from error

    def _render(self, messages: Sequence[ChatMessage], **more: Callable[[str], str]) -> str:
        arguments = {**self._arguments, **more}
        return self._renderer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)

    def _only_text(self) -> str:
        """Of several named templates the tokenizer takes the one named `default`."""
        templates = self._renderer.chat_template
        if not isinstance(templates, dict):
            return templates or ""
        if "default" not in templates:
            raise ValueError(
                f"model: the chat templates in {self._directory} are named {', '.join(sorted(templates))}; name one of "
                "them default"
            )
        return templates["default"]

    def _refuse_arguments(self) -> None:
        reserved = {"messages", "strftime_now", *inspect.signature(self._renderer.apply_chat_template).parameters}
        for name in self._arguments:
            if name in reserved:
                raise ValueError(
                    f"chat_template_arguments: {name!r} is set with every conversation and is no argument of the "
                    "template; remove it"
                )
            if not self._reads(name):
                raise ValueError(
                    f"chat_template_arguments: the chat template in {self._directory} does not read {name!r}; "
                    "correct the name, or remove it"
                )

    def _refuse_todays_date(self) -> None:
        """With today's date in it, a prompt changes at midnight: the run could not resume."""
        if not self._reads("strftime_now"):
            return
        from jinja2 import TemplateError

        user = ChatMessage(role="user", content="1 + 1")
        for messages in ([user], [ChatMessage(role="system", content="Be brief."), user]):
            try:
                texts = {self._render(messages, strftime_now=clock.strftime) for clock in CLOCKS}
            except TemplateError:  # the prompts may have another form
                continue
            if len(texts) > 1:
                raise ValueError(
                    f"the chat template in {self._directory} writes today's date, so prompts would change at midnight "
                    f"and the run could not resume; {self._fix_of_date()}"
                )

    def _fix_of_date(self) -> str:
        if self._reads("date_string") and "date_string" not in self._arguments:
            return "set data.chat_template_arguments.date_string (eval: chat_template_arguments.date_string)"
        return "write a fixed date into the template in the place of strftime_now"

    def _reads(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self.text) is not None
