"""Where each rank's stream stands, in a checkpoint."""

import json
from collections.abc import Sequence

from ddp_kit.loader import Mark
from ddp_kit.trainer.callback_states import as_text, from_text
from ddp_kit.trainer.random_text import decoded, encoded


def place_as_text(place: Sequence[Mark]) -> str | None:
    """None where the data is no stream with a state, or no epoch is begun."""
    if not place:
        return None
    return json.dumps([[mark.reader, mark.number, encoded(mark.random), as_text(mark.dataset)] for mark in place])


def place_of(texts: Sequence[str | None], rank: int, ranks: int) -> tuple[Mark, ...]:
    """Of this rank; empty where there are not as many ranks as in the checkpoint. Raises an error for other texts."""
    text = texts[rank] if len(texts) == ranks else None
    if text is None:
        return ()
    return tuple(
        Mark(int(reader), int(number), decoded(random), from_text(state))
        for reader, number, random, state in json.loads(text)
    )
