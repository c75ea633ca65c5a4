"""What is refused at start-up, and how it is said. No SGLang, but for the names of its options."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from hs_runtime import sglang_seam
from hs_runtime.config import BACKEND_NAME
from hs_runtime.sglang_seam import REFUSALS, model_refusals, refusals_of

# What a server of ours has, where SGLang's default would be refused.
SERVED = {
    "page_size": 64,
    "chunked_prefill_size": 2048,
    "kv_cache_dtype": "auto",
    "radix_cache_backend": BACKEND_NAME,
    "schedule_policy": "fcfs",
}

REFUSED: list[tuple[str, Any]] = [
    ("page_size", 1),
    ("page_size", 128),
    ("chunked_prefill_size", -1),
    ("chunked_prefill_size", None),
    ("chunked_prefill_size", 2000),
    ("chunked_prefill_size", 64),
    ("kv_cache_dtype", "fp8_e5m2"),
    ("kv_cache_dtype", "fp4_e2m1"),
    ("radix_cache_backend", None),
    ("prefill_attention_backend", "fa3"),
    ("decode_attention_backend", "flashinfer"),
    ("disaggregation_mode", "prefill"),
    ("schedule_policy", "routing-key"),
    ("speculative_algorithm", "EAGLE"),
    ("enable_hierarchical_cache", True),
    ("enable_lora", True),
    ("lora_paths", ["a"]),
    ("enable_mixed_chunk", True),
    ("enable_memory_saver", True),
    ("enable_priority_scheduling", True),
    ("use_ray", True),
    ("kv_events_config", "{}"),
    ("kv_canary", "full"),
    ("dp_size", 2),
    ("pp_size", 4),
    ("attn_cp_size", 2),
    ("tokenizer_worker_num", 2),
]


def server_args(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**SERVED, **changes})


def test_what_we_start_with_is_served() -> None:
    assert refusals_of(server_args()) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("kv_cache_dtype", "bfloat16"),
        ("schedule_policy", "lpm"),
        ("prefill_attention_backend", BACKEND_NAME),
        ("disaggregation_mode", "null"),
        ("chunked_prefill_size", 32768),
        ("kv_canary", "none"),
        ("dp_size", 1),
        ("tokenizer_worker_num", 1),
    ],
)
def test_legal_values_are_served(option: str, value: Any) -> None:
    assert refusals_of(server_args(**{option: value})) == []


@pytest.mark.parametrize(("option", "value"), REFUSED)
def test_a_refusal_names_the_option_its_value_and_what_is_legal(option: str, value: Any) -> None:
    (sentence,) = refusals_of(server_args(**{option: value}))
    (refusal,) = [each for each in REFUSALS if each.option == option]
    assert sentence.startswith(f"--{option.replace('_', '-')} {value!r} cannot be served: ")
    assert refusal.reason in sentence and sentence.endswith(f"({refusal.legal})")


def test_all_refusals_are_said_at_once() -> None:
    found = refusals_of(server_args(page_size=16, enable_lora=True, dp_size=2))
    assert [each.split()[0] for each in found] == ["--page-size", "--enable-lora", "--dp-size"]


def test_the_table_for_people_is_the_table_that_refuses() -> None:
    table = sglang_seam.refusal_table()
    assert [row["option"][2:].replace("-", "_") for row in table] == [r.option for r in REFUSALS]
    assert len({r.option for r in REFUSALS}) == len(REFUSALS), "one line for each option"
    assert all(row["reason"] and row["legal"] for row in table)


def model(**changes: Any) -> SimpleNamespace:
    hf = SimpleNamespace(attn_logit_softcapping=changes.pop("softcap", None))
    values = {
        "attention_arch": SimpleNamespace(name="MHA"),
        "head_dim": 128,
        "v_head_dim": 128,
        "is_hybrid_swa": False,
        "is_encoder_decoder": False,
        "hf_text_config": hf,
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_arch": SimpleNamespace(name="MLA")}, "attention MLA"),
        ({"is_hybrid_swa": True}, "sliding-window"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"softcap": 50.0}, "capped attention logits"),
        ({"v_head_dim": 64}, "head_dim 128 for K and 64 for V"),
    ],
)
def test_a_model_that_blocks_cannot_hold_is_refused_by_name(
    change: dict[str, Any], named: str
) -> None:
    assert model_refusals(model()) == []
    (sentence,) = model_refusals(model(**change))
    assert named in sentence


@pytest.mark.integration
def test_every_refused_option_exists_in_this_sglang() -> None:
    """A refusal of a name that SGLang does not know would never refuse."""
    from sglang.srt.server_args import ServerArgs

    from hs_runtime import spawn  # noqa: F401  (prepares the process before SGLang is imported)

    known = {field.name for field in dataclasses.fields(ServerArgs)}
    assert [r.option for r in REFUSALS if r.option not in known] == []
    assert {each for each, _ in REFUSED} <= known


def test_what_a_grammar_allows_is_pinned_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("xgrammar")
    asked: list[tuple[int, int]] = []

    def pinned(vocab_size: int, batch_size: int) -> str:
        asked.append((vocab_size, batch_size))
        return "pinned"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sglang_seam._allocate_bitmask(pinned, 100, 2) == "pinned" and asked == [(100, 2)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    mask = sglang_seam._allocate_bitmask(pinned, 100, 2)
    assert len(asked) == 1 and mask.shape == (2, 4) and bool((mask == -1).all())
    logits = torch.zeros(2, 100)
    mask[0] = torch.tensor([0b101, 0, 0, 0])
    sglang_seam._mask_logits(None, None, logits, mask)
    assert logits[0].isfinite().nonzero().flatten().tolist() == [0, 2]
    assert bool(logits[1].isfinite().all())
