"""The calibration file: one file (safetensors) of a model, made once and checked at every start.

Tensors, for all layers (L), kv heads (Hkv) and channels (D), in the order that `permutation` gives
except itself:

    permutation  int32   [L, Hkv, D]              new channel -> channel of the model, after RoPE
    query_rms    float32 [L, Hkv, D]              root mean square of q, over a kv head's queries
    mean_score   float32 [L, Hkv, D]              mean of q times the softmax scale: its product
                                                  with a key is the score of an average query
    key_rms      float32 [L, Hkv, D]
    factor       float16 [L, Hkv, D (D + 1) / 2]  rows of the upper triangle U with U' U = the
                                                  inverse of E[q q'] with a ridge; scale is free
    layer_cost   float32 [L]                      KL in nats when that layer alone is pruned; files
                                                  of earlier versions are without it

The last one shapes no block. It is for choosing layers, and a file is known by the others
(`digest`). One metadata entry, `hierasparse`, is canonical JSON, so that equal calibrations are
equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from hs_runtime.config import DEMO_MODEL, ConfigError

# Not *.safetensors: a loader of weights would take it for a part of the model.
FILE_NAME: Final = "hierasparse.calibration"
DEMO_FILE: Final = Path(__file__).parent / "data" / "SmolLM2-135M-Instruct.calibration"
VERSION: Final = 1

_METADATA: Final = "hierasparse"
_CONSTANTS: Final = ("permutation", "query_rms", "mean_score", "key_rms", "factor")
_LAYER_COST: Final = "layer_cost"
_SAMPLE_BYTES: Final = 4096
_SAMPLED: Final = ("q_proj", "k_proj", "qkv_proj", "q_norm", "k_norm")
_CONFIG_KEYS: Final = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
)


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Constants of a model (or of one rank's heads); `factor` is unpacked, f32 [L, Hkv, D, D].

    `text` is the SHA-256 of the calibrating text, `tokens` how many of its tokens were read.
    `layer_cost` f32 [L] is None in files of earlier versions.
    """

    permutation: Tensor
    query_rms: Tensor
    mean_score: Tensor
    key_rms: Tensor
    factor: Tensor
    fingerprint: str
    text: str
    tokens: int
    layer_cost: Tensor | None = None

    @property
    def layers(self) -> list[Mapping[str, Tensor]]:
        """What a pruner is given of each layer."""
        names = ("query_rms", "mean_score", "key_rms", "factor")
        return [
            {name: getattr(self, name)[layer] for name in names}
            for layer in range(self.permutation.shape[0])
        ]

    def of_rank(self, rank: int, ranks: int) -> Calibration:
        """The kv heads of one tensor-parallel rank; ranks beyond the heads share them."""
        heads = self.permutation.shape[1]
        first = rank * heads // ranks
        return self._each(lambda x: x[:, first : first + max(1, heads // ranks)].contiguous())

    def to(self, device: torch.device) -> Calibration:
        return self._each(lambda x: x.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Calibration:
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in _CONSTANTS}
        return replace(self, **changed)


def default_file(model_path: str, *, is_demo: bool) -> Path | None:
    """The file that belongs to a model: beside its weights, or shipped for the demonstration."""
    beside = Path(model_path).expanduser() / FILE_NAME
    if beside.is_file():
        return beside
    return DEMO_FILE if is_demo else None


def how_to_make(model_path: str | None) -> str:
    """What errors advise who has no file that can be used; None stands for an unknown model."""
    if model_path is None:
        return "make one with `hs-runtime calibrate --model FOLDER`"
    if model_path == DEMO_MODEL or Path(model_path).expanduser().is_dir():
        return f"make one with `hs-runtime calibrate --model {shlex.quote(model_path)}`"
    return (
        f"`hs-runtime calibrate` needs a folder: download {model_path}, make one with `hs-runtime "
        "calibrate --model FOLDER`, and give --model FOLDER here"
    )


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Writes the file, whole or not at all; equal calibrations give equal bytes."""
    from safetensors.torch import save

    channels = calibration.factor.shape[-1]
    row, column = torch.triu_indices(channels, channels)
    tensors = {
        "permutation": calibration.permutation.to(torch.int32),
        "query_rms": calibration.query_rms.to(torch.float32),
        "mean_score": calibration.mean_score.to(torch.float32),
        "key_rms": calibration.key_rms.to(torch.float32),
        "factor": calibration.factor[..., row, column].to(torch.float16),
    }
    if calibration.layer_cost is not None:
        tensors[_LAYER_COST] = calibration.layer_cost.to(torch.float32)
    about = {
        "fingerprint": calibration.fingerprint,
        "text": calibration.text,
        "tokens": calibration.tokens,
        "version": VERSION,
    }
    data = save(
        {name: tensor.contiguous().cpu() for name, tensor in tensors.items()},
        {_METADATA: json.dumps(about, sort_keys=True, separators=(",", ":"))},
    )
    begun = path.with_name(f".{path.name}.begun")
    begun.write_bytes(data)
    begun.replace(path)


def load_calibration(path: Path, model_path: str | None = None) -> Calibration:
    """Reads and checks a file; with `model_path`, that it was made for the model in that folder.

    Raises ConfigError that says what is wrong and, at its end, what to do.
    """
    from safetensors import SafetensorError, safe_open

    make = how_to_make(model_path)
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[_METADATA])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        version = about["version"]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"calibration: {path} is no calibration file: {make}") from error
    if version != VERSION:
        raise ConfigError(
            f"calibration: {path} has format {version}, this version reads {VERSION}: {make}"
        )
    try:
        calibration = _unpack(tensors, about)
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(f"calibration: {path} is damaged ({error}): {make}") from error
    if model_path is not None and fingerprint(model_path) != calibration.fingerprint:
        raise ConfigError(
            f"calibration: {path} was made for another model than {model_path} (its weights or "
            f"its config differ): {make}"
        )
    return calibration


def read_layer_costs(path: Path, model_path: str | None = None) -> list[float]:
    """What pruning costs in each layer, in nats, as a file says. Raises ConfigError when it does
    not, with advice for the model."""
    costs = load_calibration(path).layer_cost
    if costs is None:
        raise ConfigError(
            f"calibration: {path} does not say what pruning costs in each layer, since an earlier "
            f"version made it: {how_to_make(model_path)}"
        )
    measured: list[float] = costs.tolist()
    return measured


def digest(path: Path) -> str:
    """SHA-256 of what a file says of pruning: what `ServerConstants.calibration` holds.

    Files that differ in `layer_cost` alone have one digest, that of the file without it: equal
    blocks may be shared, and what was measured of one is true of the other.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save

    data = path.read_bytes()
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata()
    except SafetensorError:  # no calibration, and so none of those that anybody asks for
        return hashlib.sha256(data).hexdigest()
    if tensors.pop(_LAYER_COST, None) is not None:
        data = save(tensors, metadata)
    return hashlib.sha256(data).hexdigest()


def _unpack(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Calibration:
    permutation, packed = tensors["permutation"], tensors["factor"]
    layers, heads, channels = permutation.shape
    row, column = torch.triu_indices(channels, channels)
    factor = torch.zeros((layers, heads, channels, channels))
    factor[..., row, column] = packed.to(torch.float32)
    order = permutation.long().sort(-1).values
    if not bool((order == torch.arange(channels)).all()):
        raise ValueError("the permutation leaves channels out")
    if not bool(factor.isfinite().all()):
        raise ValueError("the factor is not finite")
    if not bool((factor.diagonal(dim1=-2, dim2=-1) > 0).all()):
        raise ValueError("the factor has no positive diagonal")
    rest = {name: tensors[name] for name in ("query_rms", "mean_score", "key_rms")}
    for name, tensor in rest.items():
        _check(name, tensor, [layers, heads, channels])
    costs = tensors.get(_LAYER_COST)
    if costs is not None:
        _check(_LAYER_COST, costs, [layers])
        if bool((costs < 0).any()):
            raise ValueError(f"{_LAYER_COST} is below 0")
    return Calibration(
        permutation=permutation.to(torch.int32),
        factor=factor,
        fingerprint=str(about["fingerprint"]),
        text=str(about["text"]),
        tokens=int(about["tokens"]),
        layer_cost=costs,
        **rest,
    )


def _check(name: str, tensor: Tensor, shape: list[int]) -> None:
    if tensor.dtype != torch.float32:
        raise ValueError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not float32")
    if list(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}, not {shape}")
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} is not finite")


def fingerprint(model_path: str) -> str:
    """SHA-256 of what decides a model's queries and keys, without reading all of its weights: the
    shape in its config, names, types and shapes of all tensors, and the first bytes of those that
    make Q and K. Raises ConfigError if the folder has no safetensors."""
    folder = Path(model_path).expanduser()
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {folder} has no readable config.json ({error})") from error
    parts: dict[str, Any] = {
        "config": {key: config[key] for key in _CONFIG_KEYS if key in config},
        "tensors": dict(_tensors(folder)),
    }
    if not parts["tensors"]:
        raise ConfigError(f"model: {folder} has no *.safetensors, which a calibration is tied to")
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8")).hexdigest()


def _tensors(folder: Path) -> Iterator[tuple[str, list[Any]]]:
    """Name -> type, shape and, of those that make Q and K, a digest of the first bytes."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header, start = _header(file, path)
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                described = [entry["dtype"], entry["shape"]]
                if any(part in name for part in _SAMPLED):
                    begin, end = entry["data_offsets"]
                    file.seek(start + begin)
                    sample = file.read(min(_SAMPLE_BYTES, end - begin))
                    described.append(hashlib.sha256(sample).hexdigest())
                yield name, described


def _header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file, and where its data starts."""
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            raise ValueError(f"a header of {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
    except (struct.error, ValueError) as error:
        raise ConfigError(f"model: {path} is no safetensors file ({error})") from error
    return header, 8 + length
