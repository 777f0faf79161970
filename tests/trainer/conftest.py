"""What several tests of the Trainer need."""

from collections.abc import Iterator

import pytest

from ddp_kit.log import logger


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The messages that are logged during the test."""
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="INFO")
    yield lines
    logger.remove(handler)
