"""The program that locks, lists and fetches checkpoints in object storage for a process that does not import obstore.

`client.Service` starts it. Each request is JSON with the name of a method of `_Requests` and its arguments.
"""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_kit.checkpoint.format import MANIFEST, StoredCheckpoint, manifest_in
from ddp_kit.child_program import serve
from ddp_kit.storage.fetching import fetch_file, fetch_manifest
from ddp_kit.storage.lease import Lease
from ddp_kit.storage.listing import Listing, best
from ddp_kit.storage.saving import set_aside
from ddp_kit.storage.store import MissingError, Store

_MOST_LISTED = 32  # complete checkpoints


class _Requests:
    """What a rank may ask for; each method returns what JSON can express."""

    def __init__(self, url: str) -> None:
        self._store = Store(url)
        self.lease = Lease(Store(url, patient=False))
        self.folders: list[Path] = []

    def take(self, own: dict[str, Any]) -> Any:
        """Try to take the lock; see `Lease.take`."""
        answer, holder = self.lease.take(own)
        return answer, holder, self.lease.warnings

    def note_wrote(self, run: str) -> None:
        """See `Lease.note_wrote`."""
        self.lease.note_wrote(run)

    def newest(self, branch: str = "") -> Any:
        """The step and the problem of each checkpoint, newest first, until enough are complete.

        `branch`: the folder of an abandoned branch, whose checkpoints are meant.
        """
        listing = Listing(self._store)
        steps = listing.steps(branch)
        found: list[StoredCheckpoint] = []
        while steps and sum(checkpoint.whole for checkpoint in found) < _MOST_LISTED:
            found += listing.each(steps[:_MOST_LISTED], folder=branch)
            steps = steps[_MOST_LISTED:]
        return [(checkpoint.step, checkpoint.problem) for checkpoint in found]

    def best(self, branch: str) -> Any:
        """The step of the best checkpoint; None if there is none. `branch`: as for `newest`."""
        found = best(Listing(self._store), branch)
        return None if found is None else found.step

    def examine(self, place: str) -> Any:
        """The problem and the size of a checkpoint; None if it has no manifest."""
        found = Listing(self._store).checkpoint(place)
        if found is None:
            return None
        return found.problem, found.manifest.bytes if found.manifest else 0

    def size(self, place: str) -> int:
        """The size of all files of a checkpoint in bytes; 0 if it has no manifest."""
        with suppress(MissingError):
            content, _ = self._store.get(f"{place}/{MANIFEST}")
            manifest, _ = manifest_in(content, None)
            return manifest.bytes if manifest else 0
        return 0

    def fetch(self, place: str, name: str, folder: str, owned: bool) -> None:
        """Fetch a file of a checkpoint; "": its manifest. `owned`: whether to remove the folder when this ends."""
        if owned and Path(folder) not in self.folders:
            self.folders.append(Path(folder))
        if name:
            fetch_file(self._store, place, name, Path(folder))
        else:
            fetch_manifest(self._store, place, Path(folder))

    def set_aside(self, after: int) -> Any:
        """See `saving.set_aside`."""
        return set_aside(self._store, after)

    def put(self, name: str, content: str) -> None:
        """Write a small object."""
        self._store.put(name, content.encode())


def main(parent: int, line: int) -> None:
    """Answer the requests of a rank until it ends; then give its lock back."""
    services: dict[str, _Requests] = {}

    def handle(text: str) -> Any:
        url, name, arguments = json.loads(text)
        if url not in services:
            services[url] = _Requests(url)
        return getattr(services[url], name)(**arguments)

    try:
        serve(parent, line, handle)
    finally:
        for service in services.values():
            service.lease.release()
            for folder in service.folders:
                shutil.rmtree(folder, ignore_errors=True)
