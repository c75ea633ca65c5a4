"""A Llama small enough to write in a second and random enough to have an opinion.

(SGLang's `--load-format dummy` gives constant logits, which no comparison of tokens would notice.)
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_llama(
    path: Path,
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    vocab: int = 320,
    context: int = 8192,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write config, weights and tokenizer into the folder `path`; the same seed, the same bytes.

    A token is a byte; ids from 256 on are `SPECIAL_TOKENS`, what follows them is never encoded.
    Greedy answers do not end before `max_tokens` unless the model happens to say `<|end|>`.
    """
    if vocab < SMALLEST_VOCABULARY:
        raise ValueError(f"vocab={vocab}: choose at least {SMALLEST_VOCABULARY}")
    path.mkdir(parents=True, exist_ok=True)
    hidden, inner = heads * head_dim, 2 * heads * head_dim
    _write_json(
        path / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab,
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": 256,
            "torch_dtype": str(dtype).removeprefix("torch."),
        },
    )
    _write_tokenizer(path, context)
    save_file(
        _weights(layers, hidden, inner, heads, kv_heads, head_dim, vocab, seed, dtype),
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    return path


def _weights(
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    seed: int,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        scale = gain * columns**-0.5
        return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)

    weights = {"model.embed_tokens.weight": matrix(vocab, hidden, hidden**0.5)}
    for layer in range(layers):
        block = f"model.layers.{layer}."
        # Queries and keys with gain make attention choose; without it all keys weigh the same,
        # and pruning would change nothing that a test could see.
        weights |= {
            block + "input_layernorm.weight": torch.ones(hidden, dtype=dtype),
            block + "self_attn.q_proj.weight": matrix(heads * head_dim, hidden, 1.5),
            block + "self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden, 1.5),
            block + "self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            block + "self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            block + "post_attention_layernorm.weight": torch.ones(hidden, dtype=dtype),
            block + "mlp.gate_proj.weight": matrix(inner, hidden),
            block + "mlp.up_proj.weight": matrix(inner, hidden),
            block + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    weights["model.norm.weight"] = torch.ones(hidden, dtype=dtype)
    weights["lm_head.weight"] = matrix(vocab, hidden, 3.0)
    return weights


def _write_tokenizer(path: Path, context: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[0],
            "pad_token": SPECIAL_TOKENS[0],
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
        },
    )


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
