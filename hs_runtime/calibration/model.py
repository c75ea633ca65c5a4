"""The model as calibration reads it: transformers' forward pass, with attention from outside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from hs_runtime.config import ConfigError

_NUMBERS: Final = count()  # of models: transformers knows attention functions by name


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
    """The model of a local folder, by default f32 on a CPU and else as its checkpoint has it
    ("auto"); ConfigError when transformers cannot load it.

    `layers` is their number, `context` the tokens that it was made for (0: its config is silent).
    """

    def __init__(
        self, model_path: str, device: str, dtype: torch.dtype | str | None = None
    ) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        attention = f"hierasparse_calibration_{next(_NUMBERS)}"
        AttentionInterface.register(attention, self._attention)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                model_path,
                local_files_only=True,
                dtype=dtype or (torch.float32 if device == "cpu" else "auto"),
                attn_implementation=attention,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: transformers cannot load {model_path} ({error})") from error
        self._model = model.to(device).eval()
        self._device = device
        config = model.config.get_text_config()
        self.layers = int(config.num_hidden_layers)
        self.context = int(getattr(config, "max_position_embeddings", 0) or 0)
        self._attend: Attend | None = None
        self._seen: set[int] = set()  # layers that asked for attention

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
        self._seen.add(module.layer_idx)
        out = self._attend(module.layer_idx, query, key, value, scale)
        return out.transpose(1, 2).contiguous(), None

    def read(self, tokens: Sequence[int], positions: range, attend: Attend) -> None:
        """One pass without logits, which would be its largest tensor. Raises ConfigError when not
        every layer asked `attend`."""
        self._run(self._model.base_model, tokens, positions, attend)
        if self._seen != set(range(self.layers)):
            raise ConfigError(
                f"model: {len(self._seen)} of {self.layers} layers showed their queries, so "
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
    def in_float32(self) -> Iterator[None]:
        """Passes compute in f32 with the weights as they are. Those of a layer are widened while it
        runs and no longer, since all of them might not fit the device."""
        blocks = self._blocks()
        of_blocks = {id(weight) for block in blocks for weight in block.parameters()}
        others = [w for w in self._model.parameters() if id(w) not in of_blocks]
        narrow: dict[int, Tensor] = {}

        def widen(weights: Iterable[Tensor]) -> None:
            for weight in weights:
                narrow[id(weight)] = weight.data
                weight.data = weight.data.to(torch.float32)

        def restore(weights: Iterable[Tensor]) -> None:
            for weight in weights:
                weight.data = narrow.pop(id(weight))

        def begin(block: Any, *_: Any) -> None:
            widen(block.parameters())

        def end(block: Any, *_: Any) -> None:
            restore(block.parameters())

        hooks = [block.register_forward_pre_hook(begin) for block in blocks]
        hooks += [block.register_forward_hook(end) for block in blocks]
        widen(others)
        try:
            yield
        finally:
            restore(others)
            for hook in hooks:
                hook.remove()

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
                named = [
                    {getattr(part, "layer_idx", None) for part in each.modules()}
                    for each in modules
                ]
                if all(layer in names for layer, names in enumerate(named)):
                    return list(modules)
        raise ConfigError(
            "model: its layers are not in a list, so this architecture cannot be calibrated "
            "(choose --pruner magnitude)"
        )
