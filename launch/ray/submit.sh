#!/usr/bin/env bash
# Made by: ddpkit submit --on ray --nodes 2 --gpus 8 train.py
exec ray job submit --working-dir . -- python -m ddp_kit.clusters.ray_driver --nodes 2 --retries 3 --gpus 8 --cpus 64 -- train.py
