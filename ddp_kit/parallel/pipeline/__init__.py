"""Pipeline parallelism: the blocks of a model divided into consecutive stages, one on each rank of the pipeline.

strategy.py      where weights and buffers are, the order of the passes, and the reduction of gradients
stage.py         what torch's schedules call to run and connect the passes of a stage
model.py         how a model is divided into stages, and its forward pass on one of them
"""
