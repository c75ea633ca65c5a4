"""A tokenizer in which a token is a character, for tests that need none in particular."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hs_runtime.evaluation.model import Language


class Characters:
    chat_template = "yes"

    def __call__(self, text: str, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(each) for each in text])

    def decode(self, tokens: Any, **options: Any) -> str:
        return "".join(map(chr, tokens))

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return "".join(f"<{each['role']}>{each['content']}" for each in messages) + "<answer>"


def language(*start: int) -> Language:
    """`start` are the tokens that it wants before any text."""
    return Language(Characters(), start)
