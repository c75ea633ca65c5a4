"""Breaks one decision in the code under test, so that a test can say that the laws notice."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from types import ModuleType
from typing import Any

import pytest


def break_law(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    target: str,
    old: str,
    new: str,
    importers: tuple[ModuleType, ...] = (),
) -> None:
    """Replaces text in the source of `target` ("function", "Class.method", or a private method of
    that name that does the work), here and in modules that imported the function."""
    owner_name, _, name = target.rpartition(".")
    owner: Any = getattr(module, owner_name) if owner_name else module
    for attribute in (name, f"_{name}"):
        if hasattr(owner, attribute):
            code = textwrap.dedent(inspect.getsource(getattr(owner, attribute)))
            if old in code:
                break
    else:
        raise AssertionError(f"{target} reads differently now: no {old!r}")
    scope = dict(vars(module))
    flags = __future__.annotations.compiler_flag
    exec(compile(code.replace(old, new), target, "exec", flags=flags, dont_inherit=True), scope)
    for place in (owner, *importers):
        if hasattr(place, attribute):
            monkeypatch.setattr(place, attribute, scope[attribute])
