"""Checkpoints that cannot lie: whole or not there, bitwise identical when loaded, and nothing unpickled.

    saver.py       Saver: a copy of the state in host memory, then training continues
    packing.py     nested state -> tensors by name, and JSON;  unpacking.py: the inverse, which trusts nothing
    division.py    which tensors this process writes, where several write;  layout.py: where they lie in its files
    buffer.py      host memory that two processes share;  copying.py: copies into it
    background.py  the process that writes, as the trainer sees it;  process.py: that process itself
    writing.py     host memory -> a checkpoint: one rename, retention;  files.py: each file, hashed and synced
    shares.py      one checkpoint from several processes, which meet in its folder
    system.py      the operations on files that all of these use
    lock.py        one run at a time in a folder
    loading.py     files -> nested state, verified: whole tensors, or the pieces that a rank holds

What can be found out without torch is in ddp_kit/manifest.py, tensor_files.py and tensor_reading.py. The process that
writes imports this folder, so that importing it imports nothing.
"""
