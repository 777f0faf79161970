"""A store with a URL of its own for each test."""

import pytest

from ddp_kit.storage.store import Store


@pytest.fixture
def store(url: str) -> Store:
    return Store(url)
