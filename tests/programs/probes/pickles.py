"""Classes and functions of a script, sent to other processes in every way of multiprocessing."""

import enum
import json
import multiprocessing
import os
import pickle
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    number: int


class Colour(enum.Enum):
    RED = 1


class Plain:
    def double(self, number: int) -> int:
        return 2 * number


def next_of(record: Record) -> Record:
    return Record(record.number + 1)


def seen_in_child(_: int) -> dict[str, object]:
    main = sys.modules["__main__"]
    return {
        "__name__": __name__,
        "__main__": [main.__name__, getattr(main, "__file__", None), main.__spec__ and main.__spec__.name],
        "argv": sys.argv,
        "path": sys.path,
        "flags": repr(sys.flags),
        "executable": sys.executable,
        "process": multiprocessing.current_process().name.split("-")[0],
        "threads": [thread.name for thread in threading.enumerate()][:1],
        "leads its session": os.getsid(0) == os.getpid(),
    }


def add(queue: "multiprocessing.Queue[int]", value: "multiprocessing.Value[int]") -> None:
    with value.get_lock():
        value.value += 1
    queue.put(3)


def through(method: str) -> dict[str, object]:
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        pooled = [*pool.map(next_of, [Record(1)]), pool.apply(Plain().double, (4,)), pool.apply(str, (Colour.RED,))]
        child = pool.apply(seen_in_child, (0,))
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        executed = executor.submit(next_of, Record(7)).result()
    queue, value = context.Queue(), context.Value("i", 1)
    process = context.Process(target=add, args=(queue, value), daemon=True)
    process.start()
    got = queue.get()
    process.join()
    return {
        "pool": [str(one) for one in pooled],
        "executor": str(executed),
        "process": [process.exitcode, got, value.value],
    } | child


if __name__ == "__main__":
    again = [pickle.loads(pickle.dumps(one)) for one in (Record, Record(2), Plain.double, next_of, Colour.RED)]
    names = [pickle.dumps(one, 0).decode().split("\n")[:2] for one in (Record, next_of)]
    seen: dict[str, object] = {method: through(method) for method in ("fork", "spawn", "forkserver")}
    print(json.dumps({"again": [str(one).split(" at ")[0] for one in again], "names": names} | seen))
