"""Read from a store whose server has been killed. Argument: "serve" for the server, which is this program, too."""

import subprocess
import sys

import torch.distributed as dist

if len(sys.argv) > 1:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    print(store.port, flush=True)
    store.wait(["never"])
server = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True)
store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), None, False)
server.kill()
server.wait()
store.get("anything")
