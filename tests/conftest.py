"""Seeds for every test, and a skip that says why for tests whose machine is not here."""

import os

import pytest
import torch
from hypothesis import settings

# Derandomised: a failure on one machine is a failure on all. To search further:
# HYPOTHESIS_PROFILE=explore pytest tests/property
settings.register_profile("check", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "check"))

# Tensors of tests are small: threads only cost, and much where other processes want the cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch.cuda is not available: no GPU, or no driver for it")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
