"""The model under evaluation as the main process sees it: its tokenizer, and what it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hs_runtime.config import ConfigError

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.gguf")
_HEAD_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Language:
    """Text to tokens and back. `start` are the tokens that this model expects before any text."""

    tokenizer: Any = field(repr=False)
    start: tuple[int, ...] = ()

    @classmethod
    def load(cls, model_path: str) -> Language:
        """From a folder or a hub name. Raises ConfigError."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(model_path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: {model_path} has no tokenizer ({error})") from error
        plain = tokenizer("a", add_special_tokens=False).input_ids
        special = tokenizer("a").input_ids
        head = special[: len(special) - len(plain)]
        return cls(tokenizer, tuple(head) if special == [*head, *plain] else ())

    def tokenize(self, text: str) -> list[int]:
        """Without the model's start; cut where it says nothing of its context length."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def text(self, tokens: tuple[int, ...]) -> str:
        decoded: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return decoded

    def as_chat(self, prompt: str) -> str:
        """As a user's message, where the model has a chat template."""
        if not getattr(self.tokenizer, "chat_template", None):
            return prompt
        rendered: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return rendered


def fingerprint(model_path: str, config: Mapping[str, Any] | None) -> str:
    """SHA-256 (hex) of the config and of every weight file's name, size and first MiB; of the name
    alone for a model that is not on this disk."""
    digest = hashlib.sha256()
    folder = Path(model_path).expanduser()
    if config is None or not folder.is_dir():
        digest.update(model_path.encode("utf-8"))
        return digest.hexdigest()
    digest.update(json.dumps(config, sort_keys=True).encode("utf-8"))
    for path in sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
    return digest.hexdigest()


def vocabulary_size(model_path: str, config: Mapping[str, Any] | None) -> int:
    """Rows of the output layer."""
    if config is None:
        from transformers import AutoConfig

        return int(AutoConfig.from_pretrained(model_path).vocab_size)
    text = config.get("text_config") or config
    try:
        return int(text["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"model: the config of {model_path} has no vocab_size") from error
