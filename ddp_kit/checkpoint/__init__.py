"""Checkpoints: a checkpoint on disk is complete, loads bitwise identical, and is never unpickled.

    manager.py       Checkpoints: when to save, which checkpoint to resume from, one run per folder
    state.py         what a checkpoint holds: a class per part, and how older versions are read
    model_state.py   the parts of weights, optimizer and scheduler
    saver.py         Saver: copies the state to host memory, then training continues; the handle to the writer process
    packing.py       nested state -> named tensors and JSON, divided among writer processes, with offsets in their files
    process.py       the writer process: memory -> a checkpoint, by one or several writers, with one rename; retention
    reader.py        files -> verified nested state: whole tensors, or the pieces that a rank holds
    lock.py          one run at a time in a folder
    format.py        the manifest and the headers of tensor files; without torch
    weight_files.py  reads weights with numpy, without torch
    load_model.py    weights into a model, without a Trainer

The writer process and commands without torch import this package, so this file imports nothing.
"""
