"""What is done to a model before it is distributed.

blocks.py        its repeated blocks, which the other files and parallel/ treat one by one
precision.py     autocast, loss scaling and conversion; float8.py: products in float8
tensor_cores.py  advice about sizes of layers
compilation.py   torch.compile
activations.py   activation checkpointing and offloading
names.py         names of modules, parameters and buffers in messages
modes.py         training and evaluation mode
"""
