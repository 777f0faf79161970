"""Checkpoints: a checkpoint on disk is complete, loads bitwise identical, and is never unpickled.

    saver.py       Saver: copies the state to host memory, then training continues
    packing.py     nested state -> named tensors and JSON;  unpacking.py: the inverse, for untrusted files
    division.py    which tensors each writer process writes;  layout.py: their offsets in its files
    buffer.py      host memory shared by two processes;  copying.py: copies into it
    background.py  the training process's handle to the writer process;  process.py: the writer process itself
    writing.py     host memory -> a checkpoint, with one rename; retention;  files.py: writes, hashes and syncs a file
    shares.py      one checkpoint written by several processes, which coordinate through its folder
    system.py      the file operations that all of these use
    lock.py        one run at a time in a folder
    loading.py     files -> verified nested state: whole tensors, or the pieces that a rank holds

Code that does not need torch is in ddp_kit/manifest.py, tensor_files.py and tensor_reading.py. The writer process
imports this package, so this file imports nothing.
"""
