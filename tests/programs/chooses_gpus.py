"""Print which GPUs, threads and CPU cores a launch with half of the GPUs gets on a machine with 64 cores."""

from ddp_kit.devices import gpus as devices
from ddp_kit.devices.cpus import Cpus
from ddp_kit.launcher import plan, spec

asked = spec.parse(["--gpus", str(len(devices.gpus()) // 2), "train.py"], {})
made = plan.make(asked, devices.gpus(), {}, "id", Cpus({cpu: cpu for cpu in range(64)}), {})
print(made.env["CUDA_VISIBLE_DEVICES"], made.env["OMP_NUM_THREADS"])
print([(worker.cpus[0], worker.cpus[-1]) for worker in made.workers])
