"""A tiny model and running engines, shared by all tests of the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.engines import EngineOptions, Engines
from tests.support.golden import Golden

# Last, and in this order, since neighbours share engines and at most two run at a time.
NEIGHBOURS = ("test_requests", "test_faults", "test_oracle", "test_invariance")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(NEIGHBOURS, start=1)}
    items.sort(key=lambda item: places.get(item.path.stem, 0))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    running = Engines(tmp_path_factory.mktemp("engines"))
    yield running
    running.close()


@pytest.fixture(scope="session")
def small(tiny: Path) -> EngineOptions:
    """Segments of two pages and a window of one: everything happens within a few hundred tokens."""
    return EngineOptions(tiny, segment=128, window=64)


@pytest.fixture(scope="session")
def default(tiny: Path) -> EngineOptions:
    """The constants that a user gets."""
    return EngineOptions(tiny)


@pytest.fixture(scope="session")
def golden(tiny: Path) -> Golden:
    return Golden(tiny)
