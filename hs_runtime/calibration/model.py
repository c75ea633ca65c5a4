"""The model as calibration reads it: transformers' forward pass, with attention from outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from hs_runtime.config import ConfigError

_ATTENTION: Final = "hierasparse_calibration"


class Attend(Protocol):
    """What stands in for attention."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """[1, Hq, T, D] for q [1, Hq, T, D], k and v [1, Hkv, T, D] after RoPE; `scale` is that of
        the softmax."""


def attend_causally(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Dense attention among the tokens of one pass; shapes as `Attend`."""
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    )
    return out


class ReadModel:
    """The model of a local folder, f32 on a CPU; ConfigError when transformers cannot load it.

    `layers` is their number, `context` the tokens that it was made for (0: its config is silent).
    """

    def __init__(self, model_path: str, device: str) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(_ATTENTION, self._attention)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                model_path,
                local_files_only=True,
                dtype=torch.float32 if device == "cpu" else "auto",
                attn_implementation=_ATTENTION,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: transformers cannot load {model_path} ({error})") from error
        self._model = model.to(device).eval()
        self._device = device
        config = model.config.get_text_config()
        self.layers = int(config.num_hidden_layers)
        self.context = int(getattr(config, "max_position_embeddings", 0) or 0)
        self._attend: Attend | None = None
        self._attentions: dict[int, Any] = {}

    def _attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        scaling: float | None = None,
        **__: Any,
    ) -> tuple[Tensor, None]:
        assert self._attend is not None
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        self._attentions[module.layer_idx] = module
        out = self._attend(module.layer_idx, query, key, value, scale)
        return out.transpose(1, 2).contiguous(), None

    def read(self, tokens: Sequence[int], positions: range, attend: Attend) -> None:
        """One pass without logits, which would be its largest tensor. Raises ConfigError when not
        every layer asked `attend`."""
        self._run(self._model.base_model, tokens, positions, attend)
        if sorted(self._attentions) != list(range(self.layers)):
            raise ConfigError(
                f"model: {len(self._attentions)} of {self.layers} layers showed their queries, so "
                "this architecture cannot be calibrated (choose --pruner magnitude)"
            )

    def log_probs(self, tokens: Sequence[int], positions: range, attend: Attend) -> Tensor:
        """f32 [T, vocabulary]: of the token after each."""
        logits: Tensor = self._run(self._model, tokens, positions, attend).logits[0]
        return logits.to(torch.float32).log_softmax(-1)

    def _run(self, module: Any, tokens: Sequence[int], positions: range, attend: Attend) -> Any:
        self._attend = attend
        return module(
            torch.tensor([list(tokens)], device=self._device),
            position_ids=torch.tensor([list(positions)], device=self._device),
            use_cache=False,
        )

    @contextmanager
    def recording(self) -> Iterator[list[Any]]:
        """A list that gets what each layer gives, in order, for `resuming`."""
        outputs: list[Any] = []
        hooks = [
            block.register_forward_hook(lambda *call: outputs.append(call[-1]))
            for block in self._blocks()
        ]
        try:
            yield outputs
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def resuming(self, outputs: Sequence[Any]) -> Iterator[None]:
        """The first layers give these outputs and compute nothing, so a pass starts after them."""
        skipped = self._blocks()[: len(outputs)]
        for block, output in zip(skipped, outputs, strict=True):
            block.forward = lambda *_, output=output, **__: output
        try:
            yield
        finally:
            for block in skipped:
                del block.forward

    def _blocks(self) -> list[Any]:
        """Its layers, known by the attention in each. ConfigError if they are no list."""
        for modules in self._model.modules():
            if isinstance(modules, torch.nn.ModuleList) and len(modules) == self.layers:
                parts = [set(block.modules()) for block in modules]
                if all(self._attentions[i] in part for i, part in enumerate(parts)):
                    return list(modules)
        raise ConfigError(
            "model: its layers are not in a list, so this architecture cannot be calibrated "
            "(choose --pruner magnitude)"
        )
