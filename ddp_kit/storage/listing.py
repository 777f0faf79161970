"""The checkpoints under a URL: what a listing of its objects and their manifests say."""

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import chain
from pathlib import Path
from posixpath import normpath

from ddp_kit.checkpoint.format import (
    ASIDE,
    MANIFEST,
    Choice,
    Manifest,
    StoredCheckpoint,
    first_whole,
    manifest_in,
    name_of,
    step_of,
)
from ddp_kit.storage.remote import RemoteCheckpoint
from ddp_kit.storage.store import MissingError, Store, Stored

_LONG_AGO = timedelta(hours=1)  # a save that has put no object for this long has ended
_READERS = 16
_TOKEN = re.compile("[0-9a-f]+")


class Listing:
    """The checkpoints under the URL of a store at one moment."""

    def __init__(self, store: Store) -> None:
        """Raises `CheckpointError` if the objects cannot be listed."""
        self.store = store
        self._objects = {found.name: found for found in store.listed()}
        self._steps: dict[int, dict[str, list[Stored]]] = {}  # step -> folder of a save -> its objects
        self._manifests: dict[str, Stored] = {}  # by the folder of the checkpoint
        for name, found in self._objects.items():
            folder, _, last = name.rpartition("/")
            above, _, inner = folder.rpartition("/")
            is_place = above == "" or above.startswith(ASIDE)  # else, of a run whose URL is below this one
            if last == MANIFEST and is_place and step_of(inner) is not None:
                self._manifests[folder] = found
            step = step_of(above)
            if step is not None and _TOKEN.fullmatch(inner):  # the user's folders are left alone
                self._steps.setdefault(step, {}).setdefault(inner, []).append(found)
        current = {(found.name, json.dumps(found.version)) for found in self._manifests.values()}
        store.manifests = {key: known for key, known in store.manifests.items() if key in current}

    def steps(self, branch: str = "") -> list[int]:
        """The steps that have a manifest, newest first. `branch`: the folder of an abandoned branch; "": the run."""
        above = f"{branch}/" if branch else ""
        folders = (folder.removeprefix(above) for folder in self._manifests if folder.startswith(above))
        return sorted((step for step in map(step_of, folders) if step is not None), reverse=True)

    @property
    def branches(self) -> list[str]:
        """The names of the folders with checkpoints of abandoned branches."""
        return sorted({folder.split("/")[0] for folder in self._manifests if folder.startswith(ASIDE)})

    def each(self, steps: Sequence[int], *, folder: str = "") -> Iterator[StoredCheckpoint]:
        """Yield the checkpoints of these steps. `folder`: that of an abandoned branch."""
        places = [f"{folder}/{name_of(step)}".strip("/") for step in steps]
        with ThreadPoolExecutor(_READERS) as pool:
            yield from filter(None, pool.map(self.checkpoint, places))

    def checkpoint(self, place: str) -> StoredCheckpoint | None:
        """The checkpoint in a folder, such as `step-00000012`; None if it has no manifest."""
        found = self._manifests.get(place)
        if found is None:
            return None
        step = step_of(place.rpartition("/")[2])
        try:
            manifest, problem = self._manifest(found, step)
        except MissingError:  # another process has deleted it
            return None
        if manifest is not None and problem is None:
            problem = self._missing(place, manifest)
        return RemoteCheckpoint(Path(place), step or 0, manifest, problem, url=f"{self.store.url}/{place}")

    def objects_of(self, step: int) -> dict[str, list[Stored]]:
        """The objects of each save of a step, by the token in their names."""
        return self._steps.get(step, {})

    def is_left(self, objects: Sequence[Stored]) -> bool:
        """Whether the process of a save with these objects has certainly ended."""
        latest = max(found.modified for found in self._objects.values())  # by the clock of the store
        return max(found.modified for found in objects) < latest - _LONG_AGO

    def unnamed(self, without: Sequence[str] = ()) -> list[tuple[str, list[Stored]]]:
        """The folder and the objects of each save that no manifest names: incomplete, replaced, or in progress.

        `without`: folders whose manifests have been deleted since the listing.
        """
        saves = {
            f"{name_of(step)}/{token}": objects
            for step, tokens in self._steps.items()
            for token, objects in tokens.items()
        }
        for checkpoint in map(self.checkpoint, self._manifests.keys() - {*without}):
            if checkpoint is not None and checkpoint.manifest is None:
                return []  # what a damaged manifest names is unknown
            if checkpoint is not None and checkpoint.manifest is not None:
                token = checkpoint.manifest.folder.rpartition("/")[2]
                saves.pop(f"{name_of(checkpoint.step)}/{token}", None)
        return [*saves.items()]

    def _manifest(self, found: Stored, step: int | None) -> tuple[Manifest | None, str | None]:
        key = found.name, json.dumps(found.version)
        known = self.store.manifests
        if key not in known:
            content = manifest_bytes(self.store, found.name)
            known[key] = manifest_in(content, step)
        return known[key]

    def _missing(self, place: str, manifest: Manifest) -> str | None:
        """What is wrong with the files of a manifest, as far as the listing shows."""
        for file in manifest.files:
            name = object_name(place, manifest, file.name)
            found = self._objects.get(name)
            if found is None:
                return f"{file.name} is missing"
            if found.size != file.bytes:
                return f"{file.name} has {found.size:,} bytes instead of {file.bytes:,}"
        return None


def manifest_bytes(store: Store, name: str) -> bytes:
    """The content of a manifest, which is read again if it has arrived damaged. Raises `CheckpointError`."""
    content, _ = store.get(name)
    _, problem = manifest_in(content, None)
    if problem is not None:
        content, _ = store.get(name)
    return content


def object_name(place: str, manifest: Manifest, file: str) -> str:
    """The name of the object with a file of a checkpoint. `place`: the folder of its manifest."""
    return normpath(f"{place}/{manifest.folder}/{file}")


def newest_whole(listing: Listing) -> Choice:
    """The newest complete checkpoint, and the newer ones that are damaged."""
    return first_whole(chain.from_iterable(listing.each([step]) for step in listing.steps()))


def best(listing: Listing, branch: str = "") -> StoredCheckpoint | None:
    """The newest checkpoint that was the best when it was saved; None if there is none.

    `branch`: the folder of an abandoned branch; "": the run.
    """
    candidates = listing.each(listing.steps(branch), folder=branch)
    return next((found for found in candidates if found.manifest and found.manifest.best), None)
