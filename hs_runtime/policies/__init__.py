"""What a request may choose, and the pruners that carry it out. Imports nothing else of ours.

Pruners need torch and live in `hs_runtime.policies.pruner`; this front door does not.
"""

from hs_runtime.policies.policy import (
    CUSTOM_PARAM,
    DENSE,
    PHASES,
    POLICIES,
    PRESETS,
    PolicyError,
    ServerConstants,
    Sparsity,
    SparsityPolicy,
    Wish,
    format_thousandths,
    namespace,
    parse_policy,
    parse_thousandths,
    preset,
    resolve,
)

__all__ = [
    "CUSTOM_PARAM",
    "DENSE",
    "PHASES",
    "POLICIES",
    "PRESETS",
    "PolicyError",
    "ServerConstants",
    "Sparsity",
    "SparsityPolicy",
    "Wish",
    "format_thousandths",
    "namespace",
    "parse_policy",
    "parse_thousandths",
    "preset",
    "resolve",
]
