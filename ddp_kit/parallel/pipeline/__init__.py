"""Pipeline parallelism: the blocks of a model divided into consecutive stages, one on each rank of the pipeline.

strategy.py      where weights are, the forward pass of a stage, and the reduction of gradients
buffers.py       which ranks have the valid value of each buffer
step.py          the passes of an optimizer step, in the order of a schedule
stage.py         what torch's schedules call to run and connect the passes of a stage
model.py         how a model is divided into stages, and its forward pass on one of them
"""
