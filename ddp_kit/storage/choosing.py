"""The checkpoints that a URL may mean, for `ddpkit export` and `load_model`: a child process fetches what is read."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddp_kit.checkpoint.format import StoredCheckpoint, name_of, step_of
from ddp_kit.control_groups import available_memory
from ddp_kit.env import LEAST_SHARED_MEMORY, SHARED_MEMORY, attempt_folder, memory_folder, workers_on_node
from ddp_kit.errors import CheckpointError
from ddp_kit.storage.client import Service
from ddp_kit.storage.remote import RemoteCheckpoint, cannot_fetch
from ddp_kit.storage.urls import split, split_branch


@contextmanager
def candidates(url: str, *, best: bool = False) -> Iterator[Iterator[StoredCheckpoint]]:
    """Context manager with the checkpoints that a URL may mean, in the order in which they should be tried.

    `url`: of a checkpoint, or of a run or an abandoned branch: the newest one first, or only the best one. The files
    of a checkpoint are fetched when they are read, into a folder in memory if they fit, and removed when the next
    checkpoint is asked for, or at the end of the context. One with a problem may be without a manifest.
    Raises `CheckpointError`.
    """
    run, place = split(url)
    branch = ""
    if not place:
        run, branch = split_branch(url)
    service = Service(run)
    folders: list[Path] = []
    try:
        places: dict[str, str | None] = {place: None}
        if not place:
            places = _places(service, branch, best=best)
        yield _each(service, places, folders)
    except BaseException as error:
        if not isinstance(error, Exception):  # the user has interrupted this process
            service.kill()
        raise
    finally:
        service.close()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _places(service: Service, branch: str, *, best: bool) -> dict[str, str | None]:
    """The folder of each checkpoint to try, relative to the URL of the run, and what is known to be wrong with it."""
    above = f"{branch}/" if branch else ""
    if not best:
        return {f"{above}{name_of(step)}": problem for step, problem in service.call("newest", branch=branch)}
    step = service.call("best", branch=branch)
    if step is None:
        where = f"{service.url}/{branch}".rstrip("/")
        raise CheckpointError(
            f"no checkpoint in {where} is marked as the best",
            'train with checkpoint={"best_metric": "loss"}, or with another metric; `ddpkit checkpoints URL` lists the '
            "checkpoints under a URL",
        )
    return {f"{above}{name_of(step)}": None}


def _each(service: Service, places: dict[str, str | None], folders: list[Path]) -> Iterator[StoredCheckpoint]:
    """Yield the checkpoints. `folders`: a list, to which this adds the folders that it makes."""
    for place, known in places.items():
        url = f"{service.url}/{place}"
        step = step_of(place.rpartition("/")[2])
        problem = known
        size = 0
        if known is None:
            found = service.call("examine", place=place)
            if found is None:
                raise CheckpointError(
                    f"there is no checkpoint at {url}",
                    f"`ddpkit checkpoints {service.url}` lists the checkpoints there",
                )
            problem, size = found
        if problem is not None:
            yield RemoteCheckpoint(Path(place), step or 0, None, problem, url)
            continue
        folders.append(_new_folder(size))
        yield service.checkpoint(place, folders[-1], owned=True)
        shutil.rmtree(folders[-1], ignore_errors=True)


def _new_folder(size: int) -> Path:
    """A new folder for files of `size` bytes, in memory if they fit."""
    all_workers = size * workers_on_node()  # each may load the same model now
    base = folder_on_node(in_memory=fits_in_memory(all_workers))
    try:
        return Path(tempfile.mkdtemp(prefix="ddpkit-fetched-", dir=base))
    except OSError as error:
        raise cannot_fetch(error, base) from None


def folder_on_node(*, in_memory: bool) -> Path:
    """The folder for fetched files. If there is a launcher, it removes the folder when the job ends."""
    if in_memory:
        return memory_folder() or Path(SHARED_MEMORY)
    base = Path(tempfile.gettempdir())
    own = attempt_folder()
    return own if own is not None and own.is_relative_to(base) else base


def fits_in_memory(size: int) -> bool:
    """Whether files of `size` bytes fit into memory, next to the state that is read from them."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize > size + LEAST_SHARED_MEMORY and available_memory() > 2 * size
