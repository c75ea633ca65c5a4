"""What a request carries through SGLang's scheduler: its policy, its namespace, its storage."""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.managers.schedule_batch import Req

from hs_runtime.compression import RequestState
from hs_runtime.policies import CUSTOM_PARAM, PolicyError, SparsityPolicy
from hs_runtime.policies.policy import ServerConstants, namespace

SEPARATOR = "\x1fhs:"  # then 64 hex digits that end the key, so no client can imitate another's


def attach_policy(req: Req, default: SparsityPolicy, constants: ServerConstants) -> None:
    """Reads the policy that travels in `custom_params` and puts the request into its namespace.

    A policy that cannot be read is kept as `req.hs_error`, and the request is refused before it is
    queued.
    """
    req.hs_error, req.hs_policy, req.hs_state = None, default, None
    params = getattr(req.sampling_params, "custom_params", None) or {}
    text = params.get(CUSTOM_PARAM)
    if text is not None:
        try:
            req.hs_policy = SparsityPolicy.from_json(text)
        except PolicyError as error:
            req.hs_error = error.message
    if constants.anchor == "chunk" and _has_fractions(req.hs_policy):
        req.hs_error = (
            f"policy {req.hs_policy.to_json()}: with anchor=chunk every number is 0.0 or 1.0 "
            "(a block mask ranks the pages of a segment, choose anchor=segment)"
        )
    req.extra_key = f"{req.extra_key or ''}{SEPARATOR}{namespace(req.hs_policy, constants)}"


def _has_fractions(policy: SparsityPolicy) -> bool:
    numbers = (phase.of(side) for phase in (policy.prefill, policy.decode) for side in (0, 1))
    return any(0 < number < 1000 for number in numbers)


def policy_of(req: Req) -> SparsityPolicy:
    policy: SparsityPolicy = req.hs_policy
    return policy


def state_of(req: Req) -> RequestState:
    state: RequestState | None = req.hs_state
    if state is None:
        raise RuntimeError(f"request {req.rid} holds no storage: it was never admitted")
    return state


def namespace_digest(extra_key: str | None) -> str:
    """The namespace part of a radix key; "" for keys that are not ours."""
    return extra_key[-64:] if extra_key and SEPARATOR in extra_key else ""


def report(req: Req, values: dict[str, Any]) -> None:
    """Attaches a report to the last output token; it arrives as `meta_info["hierasparse"]`."""
    count = len(req.output_ids_through_stop)
    if count:
        req.customized_info = {"hierasparse": [None] * (count - 1) + [json.dumps(values)]}
