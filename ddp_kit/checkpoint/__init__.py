"""Saves and loads checkpoints. A checkpoint on disk is complete, is restored bitwise identical, and is never unpickled.

    manager.py       Checkpoints: when to save, which checkpoint to resume from
    state.py         the parts of a checkpoint, one class for each
    model_state.py   the parts for weights, optimizer and scheduler
    saver.py         Saver: copies the state to host memory, then training continues; controls the writer process
    packing.py       nested state -> named tensors and JSON, divided among writer processes, with offsets in their files
    writer.py        the program of the writer process: memory -> files, renamed to a checkpoint when complete; also
                     removes old checkpoints
    reader.py        files -> verified nested state: whole tensors, or the pieces that a rank holds
    series.py        Series: the checkpoints in one folder, and the ranks that write them together
    copies.py        Copies: a series in memory, from which a restart resumes
    ending.py        the program that saves the newest copy on disk when a job has ended badly
    lock.py          lets only one run at a time write to a folder, as agreed by its ranks
    format.py        the manifest and the headers of tensor files; does not import torch
    weight_files.py  reads weights with numpy, without torch
    load_model.py    loads weights into a model, without a Trainer

The writer process and the commands that do not need torch import this package, so this file imports nothing.
"""
