"""What pruning costs in each layer alone: the model predicts the end of a stretch of text as decode
does, once with all KV dense and once for each layer with that layer's K and V pruned.

Layers before the pruned one see nothing of it, and neither does what was computed of earlier
tokens. So a layer's measurement runs the last tokens through the layers from it on, no more.

A quarter of the scored tokens repeats an earlier passage. Copying depends on a few layers that
running text hardly shows: layer 18 of the demonstration model costs 0.032 nats there, and 0.0003 on
text, and what answers quote is what they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from hs_kernels.block_format import Side
from hs_kernels.reference import compensate, keep_2_4
from hs_runtime.calibration.file import Calibration
from hs_runtime.calibration.model import ReadModel, attend_causally
from hs_runtime.policies.policy import ServerConstants
from hs_runtime.policies.pruner import CalibratedPruner

STRETCH: Final = 3072  # tokens of context and scored ones
SCORED: Final = 512  # of each stretch, the last
_PAGE: Final = 64
_RULES: Final = ServerConstants()  # sink and window are those that a server has unless told
_ROWS: Final = 64  # of log-probs that are compared at once


def build_stretches(ids: Sequence[int], start: Sequence[int], context: int) -> list[list[int]]:
    """Stretches of the text that begin with the `start` tokens and end in a repetition, each of a
    passage in another place that is out of the window."""
    stretches = cut_stretches(ids, start, context)
    for i, tokens in enumerate(stretches):
        scored = scored_tokens(len(tokens))
        count = scored // 4
        room = len(tokens) - scored - _RULES.window - count - _RULES.sink
        first = _RULES.sink + max(0, room) * (i + 1) // (len(stretches) + 1)
        tokens[-count:] = tokens[first : first + count]
    return stretches


def cut_stretches(ids: Sequence[int], start: Sequence[int], context: int) -> list[list[int]]:
    """The text in stretches of equal length, whole pages each, that begin with the `start` tokens;
    what is left at the end is not used. No longer than the model's context (0: unknown)."""
    length = min(STRETCH, context or STRETCH, len(start) + len(ids)) // _PAGE * _PAGE
    own = length - len(start)
    return [[*start, *ids[i : i + own]] for i in range(0, len(ids) - own + 1, own)]


def scored_tokens(length: int) -> int:
    """How many tokens of a stretch are scored: whole pages."""
    return min(SCORED, max(1, length // 4 // _PAGE) * _PAGE)


def passes(layers: int, stretches: int) -> int:
    """Runs of one layer that `measure_layer_costs` takes, for a progress bar."""
    return stretches * (2 * layers + layers * (layers + 1) // 2)


def measure_layer_costs(
    model: ReadModel,
    stretches: Sequence[Sequence[int]],
    calibration: Calibration,
    tick: Callable[[], object],
) -> Tensor:
    """f32 [L] on the CPU: KL(dense || pruned) of the next token in nats, the mean over the scored
    tokens of all stretches, when one layer's K and V alone are pruned as `calibrated` prunes in
    decode with K and V sparse. `tick` is called once for each layer of each pass.

    In f32 whatever the model's type: in bf16 rounding alone gives 1e-3 nats, and more to earlier
    layers, which is above what most layers cost.
    """
    with model.in_float32():
        costs = torch.stack([_costs(model, tokens, calibration, tick) for tokens in stretches])
    return costs.mean(0).clamp(min=0).to(torch.float32)


def _costs(
    model: ReadModel, tokens: Sequence[int], calibration: Calibration, tick: Callable[[], object]
) -> Tensor:
    """f64 [L] of one stretch."""
    past = len(tokens) - scored_tokens(len(tokens))
    known: dict[int, tuple[Tensor, Tensor]] = {}  # K and V [Hkv, past, D] by layer

    def fill(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        tick()
        known[layer] = k[0], v[0]
        return attend_causally(q, k, v, scale)

    pruned: int | None = None

    def decode(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        tick()
        old_k, old_v = known[layer]
        whole_k, whole_v = torch.cat([old_k, k[0]], 1), torch.cat([old_v, v[0]], 1)
        sparse = prune_pages(whole_k, whole_v, calibration, layer) if layer == pruned else None
        return attend_as_decode(q[0], (whole_k, whole_v), sparse, scale)[None]

    model.read(tokens[:past], range(past), fill)
    last = tokens[past:], range(past, len(tokens)), decode
    with model.recording() as outputs:
        dense = model.log_probs(*last)
    costs = torch.zeros(model.layers, dtype=torch.float64)
    for pruned in range(model.layers):  # which `decode` reads
        with model.resuming(outputs[:pruned]):
            costs[pruned] = divergence(dense, model.log_probs(*last))
    return costs


def divergence(dense: Tensor, other: Tensor) -> float:
    """Mean KL(dense || other) over the rows of two tensors of log-probs [T, vocabulary]."""
    total = sum(
        float((a.exp() * (a - b)).sum(dtype=torch.float64))
        for a, b in zip(dense.split(_ROWS), other.split(_ROWS), strict=True)
    )
    return total / len(dense)


def attend_as_decode(
    q: Tensor, dense: tuple[Tensor, Tensor], sparse: tuple[Tensor, Tensor] | None, scale: float
) -> Tensor:
    """[Hq, S, D]: attention of the last S of T tokens, each as a decode step has it. K and V
    [Hkv, T, D] are `sparse` after the sink and before the query's window, where that is given."""
    tokens, count, sink = dense[0].shape[1], q.shape[1], _RULES.sink
    out = []
    for first in range(0, count, _PAGE):  # the window moves by pages
        page = tokens - count + first
        end, edge = page + _PAGE, max(sink, page - _RULES.window)
        kv = [x[:, :end] for x in dense]
        if sparse is not None:
            pairs = zip(kv, sparse, strict=True)
            kv = [torch.cat([x[:, :sink], y[:, sink:edge], x[:, edge:]], 1) for x, y in pairs]
        mask = torch.ones((_PAGE, end), dtype=torch.bool, device=q.device).tril(page)
        rows = q[:, first : first + _PAGE]
        out.append(
            torch.nn.functional.scaled_dot_product_attention(
                rows[None], kv[0][None], kv[1][None], attn_mask=mask, scale=scale, enable_gqa=True
            )[0]
        )
    return torch.cat(out, 1)


def prune_pages(
    k: Tensor, v: Tensor, calibration: Calibration, layer: int
) -> tuple[Tensor, Tensor]:
    """K and V [Hkv, T, D] of whole pages as one layer's sparse blocks give them back, K in the
    model's own order of channels."""
    constants: Mapping[str, Tensor] = {
        name: x.to(k.device) for name, x in calibration.layers[layer].items()
    }
    order = calibration.permutation[layer].long().to(k.device)[:, None].expand(k.shape)
    keys, values = _blocks(k.gather(2, order)), _blocks(v)
    pruner = CalibratedPruner()
    of_k = pruner.prune(keys, Side.K, constants, ranked=False)
    of_v = pruner.prune(values, Side.V, constants, ranked=False)
    assert of_k.weights is not None and of_k.factor is not None and of_v.query is not None
    kept, changed = compensate(keys, of_k.weights, of_k.factor)
    new_k = torch.where(kept, changed, 0).to(k.dtype)
    weights = (keys.to(torch.float32) * of_v.query[:, None]).sum(-1, keepdim=True).exp()
    mean = values.to(torch.float32).mean(2, keepdim=True).to(v.dtype)
    rest = (values.to(torch.float32) - mean.to(torch.float32)).to(v.dtype)
    new_v = torch.where(keep_2_4(rest.abs().to(torch.float32) * weights, Side.V), rest, 0) + mean
    return torch.empty_like(k).scatter_(2, order, _tokens(new_k)), _tokens(new_v)


def _blocks(x: Tensor) -> Tensor:
    """[N, H, 64, D] of [H, N * 64, D]."""
    pages: Tensor = x.unflatten(1, (-1, _PAGE)).transpose(0, 1)
    return pages


def _tokens(blocks: Tensor) -> Tensor:
    """[H, N * 64, D] of [N, H, 64, D]."""
    return blocks.transpose(0, 1).flatten(1, 2)
