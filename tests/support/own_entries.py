"""A class to derive from in tests of what users' subclasses add to state_dict()."""

from typing import Any

import torch


class Own:
    """Counts the calls of state_dict() and load_state_dict(), and adds the entry "own" of each plain kind."""

    saved = 0
    loaded = 0
    own: Any = None

    def state_dict(self, *args: Any, **options: Any) -> Any:
        self.saved += 1
        state = super().state_dict(*args, **options)  # type: ignore[misc]
        state["own"] = {"number": 3, "text": "a", "list": [1.5, None], "tensor": torch.arange(3), "bytes": b"b"}
        return state

    def load_state_dict(self, state: Any, *args: Any) -> Any:
        self.loaded += 1
        self.own = state["own"]
        return super().load_state_dict({name: state[name] for name in state if name != "own"}, *args)  # type: ignore[misc]

    def check_arrived(self) -> None:
        assert self.own.pop("tensor").tolist() == [0, 1, 2]
        assert self.own == {"number": 3, "text": "a", "list": [1.5, None], "bytes": b"b"}
        assert self.loaded >= 1
