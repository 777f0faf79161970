"""Checkpoints that cannot lie: whole or not there, bitwise identical when loaded, and nothing unpickled.

    saver.py       Saver: a copy of the state in host memory, then training continues
    packing.py     nested state -> tensors by name, and JSON;  unpacking.py: the inverse, which trusts nothing
    repacking.py   the same, sooner, for a state whose values alone have changed
    layout.py      which tensor lies where in which file (the safetensors format)
    buffer.py      host memory that two processes share;  copying.py: copies into it
    background.py  the process that writes, as the trainer sees it;  process.py: that process itself
    lock.py        one run at a time in a folder
    writing.py     host memory -> files: fsync, one rename, retention;  system.py: the operations it does that with
    loading.py     files -> nested state, verified

What can be found out without torch is in ddp_kit/manifest.py. The writing process imports this folder, so that
importing it imports nothing.
"""
