"""The position of each rank's stream, as stored in a checkpoint."""

import json
from collections.abc import Sequence

from ddp_kit.loader import ReaderState
from ddp_kit.state_values import whole_number
from ddp_kit.trainer.callback_states import as_text, from_text
from ddp_kit.trainer.random_text import decoded, encoded
from ddp_kit.world import RandomStates, random_states_kept, set_random_states


def place_as_text(place: Sequence[ReaderState]) -> str | None:
    """A stream's position as JSON text; None if the data is not a stream with state, or no epoch has started."""
    if not place:
        return None
    return json.dumps([[state.reader, state.number, encoded(state.random), as_text(state.dataset)] for state in place])


def place_of(texts: Sequence[str | None], rank: int, ranks: int) -> tuple[ReaderState, ...]:
    """This rank's position from the texts of all ranks; empty if the number of ranks has changed.

    Other text may raise any error.
    """
    text = texts[rank] if len(texts) == ranks else None
    if text is None:
        return ()
    with random_states_kept():  # the states are set once, to find those that the generators do not accept
        return tuple(
            ReaderState(
                whole_number(reader, "a reader"), whole_number(number, "a batch"), _set(random), from_text(state)
            )
            for reader, number, random, state in json.loads(text)
        )


def _set(text: str) -> RandomStates:
    states = decoded(text)
    set_random_states(states)
    return states
