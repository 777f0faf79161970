"""The position of each rank's stream, as stored in a checkpoint."""

import json
from collections.abc import Sequence

from ddp_kit.loader import Mark
from ddp_kit.state_values import whole_number
from ddp_kit.trainer.callback_states import as_text, from_text
from ddp_kit.trainer.random_text import decoded, encoded
from ddp_kit.world import RandomStates, random_states_kept, set_random_states


def place_as_text(place: Sequence[Mark]) -> str | None:
    """The place as JSON; None if the data is not a stream with a state, or no epoch has started."""
    if not place:
        return None
    return json.dumps([[mark.reader, mark.number, encoded(mark.random), as_text(mark.dataset)] for mark in place])


def place_of(texts: Sequence[str | None], rank: int, ranks: int) -> tuple[Mark, ...]:
    """This rank's place; empty if the number of ranks has changed. May raise any error for other text."""
    text = texts[rank] if len(texts) == ranks else None
    if text is None:
        return ()
    with random_states_kept():  # they are set once, for what the generators do not take
        return tuple(
            Mark(whole_number(reader, "a reader"), whole_number(number, "a batch"), _set(random), from_text(state))
            for reader, number, random, state in json.loads(text)
        )


def _set(text: str) -> RandomStates:
    states = decoded(text)
    set_random_states(states)
    return states
