"""Stand-ins that are small and honest: they keep the contract of what they replace, and record."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from hs_server.engine import Call, ModelCard, Report

PAGE = 64
BLOCK_BYTES = {"dense": 16384, "sparse": 9216}


class FakeEngine:
    """An `Engine` whose tokens are bytes and whose answer is as many letters as were asked for.

    `refusal` is raised before the first token, `break_after` events a RuntimeError is. While `hold`
    is set and not released, no first token comes. `calls` are (route, fields, policy) in order.
    """

    def __init__(self) -> None:
        self.model = ModelCard(vocab_size=512, context_length=4096)
        self.refusal: Exception | None = None
        self.break_after: int | None = None
        self.hold: asyncio.Event | None = None
        self.alive = True
        self.started = self.stopped = False
        self.aborted = 0
        self.calls: list[tuple[str, dict[str, Any], Any]] = []

    async def start(self) -> None:
        self.started = True

    async def stop(self) -> None:
        self.stopped = True

    def is_alive(self) -> bool:
        return self.alive

    def exposition(self) -> tuple[bytes, str]:
        return b"sglang:token_usage 0.5\n", "text/plain; charset=utf-8"

    async def chat(self, fields: Mapping[str, Any], call: Call) -> Any:
        prompt = "".join(str(message.get("content")) for message in fields["messages"])
        length = fields.get("max_completion_tokens") or fields.get("max_tokens") or 4
        return await self._openai("chat", fields, call, [prompt], length)

    async def complete(self, fields: Mapping[str, Any], call: Call) -> Any:
        prompt = fields["prompt"]
        many = isinstance(prompt, list) and not isinstance(prompt[0], int)
        prompts = prompt if many else [prompt]
        return await self._openai("complete", fields, call, prompts, fields.get("max_tokens", 16))

    async def generate(self, fields: Mapping[str, Any], call: Call) -> Any:
        await self._begin("generate", fields, call)
        prompt = fields["text"] if "text" in fields else fields["input_ids"]
        many = isinstance(prompt, list) and not isinstance(prompt[0], int)
        sampling = fields.get("sampling_params") or {}
        sampling = sampling[0] if isinstance(sampling, list) else sampling
        length, n = sampling.get("max_new_tokens", 4), sampling.get("n", 1)
        if fields.get("stream"):
            return self._outputs(prompt, length, call)
        answers = [
            self._output(str(index), each, length, call, finished=True)
            for index, each in enumerate([each for each in (prompt if many else [prompt])] * n)
        ]
        return answers if many or n > 1 else answers[0]

    async def _begin(self, route: str, fields: Mapping[str, Any], call: Call) -> None:
        self.calls.append((route, dict(fields), call.policy))
        if self.hold is not None:
            await self.hold.wait()
        if self.refusal is not None:
            raise self.refusal

    async def _outputs(self, prompt: Any, length: int, call: Call) -> AsyncGenerator[Any, None]:
        finished = False
        try:
            for count in range(1, length + 1):
                if count - 1 == self.break_after:
                    raise RuntimeError("broken on purpose")
                yield self._output("0", prompt, count, call, finished=count == length)
            finished = True
        finally:
            self.aborted += not finished

    def _output(
        self, sequence: str, prompt: Any, length: int, call: Call, *, finished: bool
    ) -> dict[str, Any]:
        if finished:
            self._report(sequence, len(prompt) + length, call)
        return {
            "text": "x" * length,
            "output_ids": [120] * length,
            "meta_info": {
                "id": sequence,
                "prompt_tokens": len(prompt),
                "completion_tokens": length,
                "finish_reason": {"type": "length", "length": length} if finished else None,
            },
        }

    def _report(self, sequence: str, tokens: int, call: Call) -> None:
        """Pages after the first are sparse under any policy that decodes V sparse."""
        pages = -(-tokens // PAGE)
        sparse = pages - 1 if call.policy.decode.value else 0
        call.reports[sequence] = Report(
            policy=call.policy,
            dense_blocks=2 * pages - sparse,
            sparse_blocks=sparse,
            kv_bytes=(2 * pages - sparse) * BLOCK_BYTES["dense"] + sparse * BLOCK_BYTES["sparse"],
            dense_equivalent_bytes=2 * pages * BLOCK_BYTES["dense"],
        )

    async def _openai(
        self, route: str, fields: Mapping[str, Any], call: Call, prompts: list[Any], length: int
    ) -> Any:
        await self._begin(route, fields, call)
        if fields.get("stream"):
            return self._events(route, fields, call, prompts[0], length)
        sequences = [each for each in prompts for _ in range(fields.get("n", 1))]
        for index, prompt in enumerate(sequences):
            self._report(str(index), len(prompt) + length, call)
        return {
            "id": "0",
            "object": "chat.completion" if route == "chat" else "text_completion",
            "model": fields["model"],
            "choices": [
                self._choice(route, index, "x" * length) for index in range(len(sequences))
            ],
            "usage": self._usage(sum(map(len, prompts)), length * len(sequences)),
        }

    def _choice(self, route: str, index: int, text: str, *, delta: bool = False) -> dict[str, Any]:
        if route != "chat":
            return {"index": index, "text": text, "finish_reason": None if delta else "length"}
        message = {"role": "assistant", "content": text}
        return {"index": index, "delta" if delta else "message": message}

    def _usage(self, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": None,
        }

    async def _events(
        self, route: str, fields: Mapping[str, Any], call: Call, prompt: Any, length: int
    ) -> AsyncGenerator[bytes, None]:
        def event(data: Any) -> bytes:
            return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"

        finished = False
        try:
            for count in range(length):
                if count == self.break_after:
                    raise RuntimeError("broken on purpose")
                choice = self._choice(route, 0, "x", delta=True)
                yield event({"id": "0", "model": fields["model"], "choices": [choice]})
            self._report("0", len(prompt) + length, call)
            if (fields.get("stream_options") or {}).get("include_usage"):
                usage = self._usage(len(prompt), length)
                yield event({"id": "0", "model": fields["model"], "choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
            finished = True
        finally:
            self.aborted += not finished
