"""The rules of compression for one request alone, in naive torch: no cache, chunks, batch or pool.

Shares nothing with the runtime that it judges: the Llama, the pruning, the ranks and the choice of
what a query reads in which form are written again here, from the rules as a reader would state
them. Shares are thousandths of (K, V); `page`, `segment`, `window` and `sink` are tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

PAGE = 64
K, V = 0, 1


@dataclass(frozen=True)
class Rules:
    """What the server fixes."""

    segment: int = 1024
    window: int = 256
    sink: int = 64
    dense_layers: tuple[int, ...] = ()  # never pruned, whatever a request chooses


@dataclass(frozen=True)
class Shares:
    """What a request chooses: how much of its (K, V) is sparse, for prefill and decode queries."""

    prefill: tuple[int, int] = (0, 0)
    decode: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Greedy:
    """A greedy answer. `prompt_logprobs[i]` is that of prompt[i + 1]; `gaps[i]` is by how much
    tokens[i] was better than the next best.

    `margin` is the smallest difference that decided something: between the second and the third of
    four elements, between the last sparse and the first dense block (relative to its loss), between
    the best two tokens. Within rounding of it another float32 computation may decide otherwise.
    Exact ties do not count: equal values are equal in any computation, and the rules settle them.
    """

    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    margin: float
    gaps: list[float]


def largest_two_of_four(x: Tensor, side: int) -> tuple[Tensor, float]:
    """[..., 64, D] -> bool, and by how much the closest choice was decided.

    K: four neighbouring channels of a token; V: four tokens of a channel.
    """
    size = x.abs()
    if side == V:
        size = size.transpose(-1, -2)
    groups = size.reshape(*size.shape[:-1], size.shape[-1] // 4, 4)
    ordered, order = groups.sort(dim=-1, descending=True, stable=True)
    keep = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., :2], True)
    keep = keep.reshape(size.shape)
    gaps = ordered[..., 1] - ordered[..., 2]
    margin = float(gaps[gaps > 0].min()) if bool((gaps > 0).any()) else 1.0
    return keep.transpose(-1, -2) if side == V else keep, margin


class Magnitude:
    """The paper's pruner, one block [64, D] of one layer, side and kv head at a time."""

    def reorder(self, layer: int, x: Tensor, kv_heads: int) -> Tensor:
        """Q or K [T, H, D] with channels as they are stored."""
        return x

    def prune(
        self, layer: int, side: int, head: int, block: Tensor, keys: Tensor
    ) -> tuple[Tensor, float, float]:
        """What is read of it once it is sparse, by how much the closest choice was decided, and its
        loss. `keys` is the K block of the same tokens."""
        keep, margin = largest_two_of_four(block, side)
        return torch.where(keep, block, 0), margin, float(block.abs()[~keep].double().sum())


class Calibrated(Magnitude):
    """With the constants of a calibration file, by their definitions: every group of four keys is
    solved from the inverse of the queries' second moment, in float64, whatever recursion the
    runtime may use."""

    def __init__(self, file: dict[str, Tensor]) -> None:
        self.permutation = file["permutation"].long()  # [layers, Hkv, D]
        self.query_rms, self.mean_score = file["query_rms"], file["mean_score"]
        layers, heads, channels = self.permutation.shape
        factor = torch.zeros((layers, heads, channels, channels), dtype=torch.float64)
        row, column = torch.triu_indices(channels, channels)
        factor[..., row, column] = file["factor"].double()
        second = torch.linalg.inv(factor.mT @ factor)  # E[q q'] with its ridge, at any scale
        # For each group of four, the inverse over the channels that are still free.
        self.inverses = [
            torch.linalg.inv(second[..., first:, first:]) for first in range(0, channels, 4)
        ]

    def reorder(self, layer: int, x: Tensor, kv_heads: int) -> Tensor:
        order = self.permutation[layer].repeat_interleave(x.shape[1] // kv_heads, dim=0)
        return x.gather(2, order.expand(x.shape))

    def prune(
        self, layer: int, side: int, head: int, block: Tensor, keys: Tensor
    ) -> tuple[Tensor, float, float]:
        if side == V:
            weights = (keys @ self.mean_score[layer, head] / 8).exp()[:, None]
            mean = block.mean(0)
            rest = block - mean
            keep, margin = largest_two_of_four(rest * weights, V)
            loss = float((rest * weights).abs()[~keep].double().sum())
            return torch.where(keep, rest, 0) + mean, margin, loss
        weights = self.query_rms[layer, head]
        plain, margin = largest_two_of_four(block * weights, K)
        loss = float((block * weights).abs()[~plain].double().sum())
        x = block.double()
        for group, inverse in enumerate(each[layer, head] for each in self.inverses):
            own = x[:, 4 * group : 4 * group + 4].float() * weights[4 * group : 4 * group + 4]
            keep, decided = largest_two_of_four(own, K)
            margin = min(margin, decided)
            x[:, 4 * group :] = without(x[:, 4 * group :], ~keep, inverse)
        return x.float(), margin, loss


def without(x: Tensor, gone: Tensor, inverse: Tensor) -> Tensor:
    """Rows [T, n] with the two of the first four that `gone` [T, 4] names set to zero, and all
    others where x H x' then changes least; `inverse` [n, n] is that of H."""
    x = x.clone()
    for a in range(4):
        for b in range(a + 1, 4):
            rows, pair = gone[:, a] & gone[:, b], [a, b]
            solved = torch.linalg.solve(inverse[pair][:, pair], x[rows][:, pair].T)
            x[rows] -= (inverse[:, pair] @ solved).T
            x[rows.nonzero(), torch.tensor(pair)] = 0
    return x


class Llama:
    """A Llama checkpoint in float32, computed for one sequence with two caches of its keys and
    values: as they were computed (`plain`), and pruned two of four (`pruned`)."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.epsilon: float = config["rms_norm_eps"]
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        self.frequencies = 1.0 / config["rope_theta"] ** steps

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name + ".weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return x * scale * self.weights[name + ".weight"]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, H, D]; channel i turns with channel i + D/2."""
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Request:
    """One request's keys and values, and the rules of who reads them how."""

    def __init__(
        self,
        model: Llama,
        rules: Rules,
        shares: Shares,
        n: int,
        room: int,
        pruning: Magnitude,
    ) -> None:
        self.model, self.rules, self.shares, self.n = model, rules, shares, n
        self.pruning = pruning
        self.losses: dict[tuple[int, int, int, int], float] = {}  # as `gaps`
        shape = (model.layers, 2, model.kv_heads, -(-room // PAGE) * PAGE, model.head_dim)
        self.plain, self.pruned = torch.zeros(shape), torch.zeros(shape)
        self.whole_pages = [0] * model.layers  # of which `pruned` is filled
        self.ranks: dict[tuple[int, int, int, int], list[tuple[float, int]]] = {}
        self.gaps: dict[tuple[int, int, int, int], float] = {}  # by layer, side, head, page
        self.margin = 1.0

    def candidates(self, segment: int) -> list[int]:
        """Pages of a segment that may be sparse: all but the sink."""
        per = self.rules.segment // PAGE
        return [p for p in range(segment * per, (segment + 1) * per) if p * PAGE >= self.rules.sink]

    def ranked(self, layer: int, side: int, head: int, segment: int) -> list[tuple[float, int]]:
        """(loss, page) of the segment's candidates, least first; a tie goes to the earlier page."""
        key = (layer, side, head, segment)
        if key not in self.ranks:
            pages = self.candidates(segment)
            self.ranks[key] = sorted((self.losses[layer, side, head, p], p) for p in pages)
        return self.ranks[key]

    def sparse_pages(self, layer: int, side: int, head: int, t: int) -> set[int]:
        """Pages that a query at position t reads sparse."""
        rules, decoding = self.rules, t >= self.n
        if layer in rules.dense_layers:
            return set()
        share = (self.shares.decode if decoding else self.shares.prefill)[side]
        if decoding:
            first_dense = t // PAGE - rules.window // PAGE
        else:
            first_dense = t // rules.segment * rules.segment // PAGE
        if decoding and share == 1000:  # page by page, as each leaves the window
            return set(range(rules.sink // PAGE, max(first_dense, 0)))
        pages: set[int] = set()
        for segment in range(max(first_dense, 0) // (rules.segment // PAGE)):
            ranked = self.ranked(layer, side, head, segment)
            count = -(-share * len(ranked) // 1000)
            pages.update(p for _, p in ranked[:count])
            if 0 < count < len(ranked):
                (last, _), (first, _) = ranked[count - 1 : count + 1]
                self.margin = min(self.margin, (first - last) / first)
        return pages

    def visible(self, layer: int, side: int, t: int, end: int) -> Tensor:
        """[Hkv, end, D]: what a query at t reads of the positions before `end`."""
        sparse = torch.zeros((self.model.kv_heads, -(-end // PAGE)), dtype=torch.bool)
        for head in range(self.model.kv_heads):
            pages = self.sparse_pages(layer, side, head, t)
            sparse[head, list(pages)] = True
            gaps = (self.gaps[layer, side, head, p] for p in pages)
            self.margin = min([self.margin, *gaps])
        chosen = sparse.repeat_interleave(PAGE, dim=1)[:, :end, None]
        plain, pruned = (x[layer, side, :, :end] for x in (self.plain, self.pruned))
        return torch.where(chosen, pruned, plain)

    def store(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """k, v [T, Hkv, D] of the positions from `start` on."""
        end = start + k.shape[0]
        for side, x in ((K, k), (V, v)):
            self.plain[layer, side, :, start:end] = x.transpose(0, 1)
        for p in range(self.whole_pages[layer], end // PAGE):
            rows = slice(p * PAGE, (p + 1) * PAGE)
            for side in (K, V):
                for head in range(self.model.kv_heads):
                    keys, block = (self.plain[layer, s, head, rows] for s in (K, side))
                    pruned, gap, loss = self.pruning.prune(layer, side, head, block, keys)
                    self.pruned[layer, side, head, rows] = pruned
                    self.gaps[layer, side, head, p] = gap
                    self.losses[layer, side, head, p] = loss
        self.whole_pages[layer] = max(self.whole_pages[layer], end // PAGE)

    def forward(self, tokens: Sequence[int], start: int) -> Tensor:
        """Log-probabilities [T, vocabulary] after each of `tokens`, which lie in one segment of the
        prompt, or are one generated token."""
        model, count = self.model, len(tokens)
        positions = torch.arange(start, start + count)
        x = model.weights["model.embed_tokens.weight"][torch.tensor(list(tokens))]
        for layer in range(model.layers):
            name = f"model.layers.{layer}."
            h = model.norm(x, name + "input_layernorm")
            q, k, v = (
                model.linear(h, f"{name}self_attn.{each}_proj").view(count, -1, model.head_dim)
                for each in "qkv"
            )
            q, k = (
                self.pruning.reorder(layer, model.rotate(x, positions), model.kv_heads)
                for x in (q, k)
            )
            self.store(layer, start, k, v)
            out = self.attend(layer, q, start)
            x = x + model.linear(out, name + "self_attn.o_proj")
            h = model.norm(x, name + "post_attention_layernorm")
            gate = torch.nn.functional.silu(model.linear(h, name + "mlp.gate_proj"))
            h = gate * model.linear(h, name + "mlp.up_proj")
            x = x + model.linear(h, name + "mlp.down_proj")
        return model.linear(model.norm(x, "model.norm"), "lm_head").log_softmax(-1)

    def attend(self, layer: int, q: Tensor, start: int) -> Tensor:
        """q [T, Hq, D] at positions from `start` on -> [T, Hq * D]."""
        model, end = self.model, start + q.shape[0]
        group = model.heads // model.kv_heads
        k, v = (
            self.visible(layer, side, start, end).repeat_interleave(group, dim=0) for side in (K, V)
        )
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * model.head_dim**-0.5
        later = torch.arange(end)[None, :] > torch.arange(start, end)[:, None]
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).reshape(q.shape[0], -1)


def greedy(
    model: Llama,
    rules: Rules,
    shares: Shares,
    prompt: Sequence[int],
    max_new: int,
    pruning: Magnitude,
) -> Greedy:
    """What a request that is alone on the server must answer."""
    n = len(prompt)
    request = Request(model, rules, shares, n, n + max_new, pruning)
    rows = [
        request.forward(prompt[start : min(start + rules.segment, n)], start)
        for start in range(0, n, rules.segment)
    ]
    table = torch.cat(rows)
    following = torch.tensor(list(prompt[1:]), dtype=torch.long)
    prompt_logprobs = table[:-1].gather(1, following[:, None])[:, 0].tolist()
    tokens: list[int] = []
    logprobs: list[float] = []
    gaps: list[float] = []
    last = table[-1]
    while True:
        best, second = last.topk(2).values.tolist()
        request.margin = min(request.margin, best - second)
        tokens.append(int(last.argmax()))
        logprobs.append(best)
        gaps.append(best - second)
        if len(tokens) == max_new:
            return Greedy(tokens, logprobs, prompt_logprobs, request.margin, gaps)
        last = request.forward(tokens[-1:], n + len(tokens) - 1)[-1]
