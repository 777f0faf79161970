"""A store with a URL of its own for each test."""

import uuid

import pytest

from ddp_kit.storage.store import Store
from tests.support.object_store import ObjectStore


@pytest.fixture
def url(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{object_store.bucket}/{uuid.uuid4().hex}/run"


@pytest.fixture
def store(url: str) -> Store:
    return Store(url)
