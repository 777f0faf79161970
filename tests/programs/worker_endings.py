"""Print which rank this is, as says_who_it_is.py does, and end. Arguments: how, and seconds for a wait in vain.

"waits"         exit with 0 at a signal, which is printed
"records"       raise an exception on rank 1, which torch's record writes to the error file; the others wait
"expires"       wait in a file timer of torch
"own file"      exit with 7 on rank 1, with an error file of its own; the others have one that torch cannot read
"ignores"       exit with 7 on rank 1; the others ignore SIGTERM, and leave the file "asked" when it comes
"""

import os
import signal
import sys
import time
from pathlib import Path

from says_who_it_is import rank

ending, seconds = sys.argv[1], int(sys.argv[2])


def wait_for_path(path):
    while not path.exists():
        time.sleep(0.01)


signal.alarm(seconds)
if ending == "waits":

    def stop(number, frame):
        os.write(1, f"got {signal.Signals(number).name} {rank}\n".encode())
        sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, stop)
    os.write(1, b"waits\n")
elif ending == "records":
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        if rank == "1":
            raise ValueError("the root cause")
        signal.pause()

    main()
elif ending == "expires":
    from torch.distributed.elastic import timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=0.1):
        signal.pause()
elif ending == "own file":
    error_file, written = Path(os.environ["TORCHELASTIC_ERROR_FILE"]), Path("written")
    if rank == "1":
        wait_for_path(written)
        error_file.write_text('{"message": "what my program says", "timestamp": 10}')
        sys.exit(7)
    error_file.write_text('{"message": {"message": "without a time"}}')  # which torch cannot read
    written.touch()
elif ending == "ignores":
    ready = Path("ready")
    if rank == "1":
        wait_for_path(ready)
        sys.exit(7)
    signal.signal(signal.SIGTERM, lambda *_: Path("asked").touch())
    ready.touch()
while True:
    signal.pause()
