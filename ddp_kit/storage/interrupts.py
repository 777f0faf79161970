"""Lets signals end a command that waits for object storage. Imports no client."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def interruptible(function: Callable[[], Result]) -> Result:
    """The result of a function that runs in a thread: a signal does not interrupt a request of the client.

    After an exception in a signal handler, the thread continues until the process ends, which must not wait for it.
    """
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(function).result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
