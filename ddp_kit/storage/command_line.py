"""What commands need for URLs: arguments that are folders or URLs, and waits that Ctrl-C ends. Imports no client."""

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ddp_kit.errors import ConfigError, UsageError
from ddp_kit.storage.urls import Location, checked_location, local_path

Result = TypeVar("Result")


def place(text: str, checked: Callable[[str], Location] = checked_location) -> Location:
    """A path, or a URL in object storage. `checked`: raises `ConfigError` if it cannot be used."""
    try:
        return checked(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{error.message}: {error.hint}") from None


def path_on_disk(text: str) -> Path:
    """A path, which is no URL."""
    try:
        return local_path(text, "it")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{error.message}: {error.hint}") from None


def record_folder(text: str) -> Path:
    """The folder with the record of a run."""
    try:
        return local_path(text, "the record of a run")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(
            f"{error.message}: pass the folder of `ddpkit launch --log-dir FOLDER` on the disk of the first node"
        ) from None


def check_on_disk(flag: str, place: str | None) -> None:
    """Raise `UsageError` if the value of a flag is a URL. `place`: None if the flag is not given."""
    try:
        local_path(place or "", flag)
    except ConfigError as error:
        raise UsageError(error.message, error.hint) from None


def interruptible(function: Callable[[], Result]) -> Result:
    """The result of a function that runs in a thread: a signal does not interrupt a request of the client.

    After an exception in a signal handler, the thread continues until the process ends, which must not wait for it.
    """
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(function).result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
