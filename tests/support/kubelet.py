"""What Kubernetes does with an Indexed Job, a JobSet and a TrainJob, on hosts made of namespaces: see hosts.py.

    cluster = Kubelet(manifest, hosts, folder, env)   # what `ddpkit submit --dry-run` prints
    cluster.start()
    cluster.resolve()     # only now do the pods find each other's names
    cluster.lose(1)       # a node is lost: everything on it dies at once, and its pod is replaced
    cluster.evict(0)      # SIGTERM, SIGKILL after the grace, and the pod is replaced
    cluster.run()         # until the Job is complete or has failed

It applies podFailurePolicy, backoffLimit and a JobSet's failurePolicy, starts a replaced pod with the same index and
name, and gives a pod what the manifest, Kubernetes and Kubeflow give it. It pulls no image: the command runs on the
host, with the variables `env` in place of those of the image.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGTERM
from typing import Any

import psutil
import yaml

from tests.support.hosts import Host, Tree
from tests.support.launching import ROOT, wait_until

SECONDS = 240.0
RUNTIME = ROOT / "launch" / "kubeflow" / "runtime.yaml"


@dataclass(frozen=True)
class _Job:
    """The Indexed Job in a manifest, and what is around it."""

    spec: dict[str, Any]
    name: str
    """Of the Job: its pods' names begin with it."""
    subdomain: str
    restarts: int | None = None
    """How often a JobSet starts the Job again; None: it is in no JobSet."""
    env: dict[str, str] = field(default_factory=dict)
    """What Kubeflow adds to that of the container."""


def _indexed_job(service: dict[str, Any], job: dict[str, Any]) -> _Job:
    name = job["metadata"]["name"]
    # The Service is what makes the pods' names known.
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    return _Job(job["spec"], name, service["metadata"]["name"])


def _job_set(name: str, spec: dict[str, Any]) -> _Job:
    (replicated,) = spec["replicatedJobs"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert spec["network"]["enableDNSHostnames"]
    reasons = ["PodFailurePolicy", "DeadlineExceeded"]  # after all others, JobSet starts the Job again
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", reasons)
    job = replicated["template"]["spec"]
    return _Job(job, f"{name}-{replicated['name']}-0", name, spec["failurePolicy"]["maxRestarts"])


def _train_job(name: str, spec: dict[str, Any]) -> _Job:
    """With the runtime that it names, and what Kubeflow's torch plug-in adds."""
    runtime, trainer = yaml.safe_load(RUNTIME.read_text()), spec["trainer"]
    assert spec["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 1, "torch": {}}
    job = _job_set(name, runtime["spec"]["template"]["spec"])
    job.spec["completions"] = job.spec["parallelism"] = trainer["numNodes"]
    (container,) = job.spec["template"]["spec"]["containers"]
    container["command"] = trainer["command"]
    given = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": "auto"}
    return replace(job, env=given | {"PET_MASTER_ADDR": f"{job.name}-0.{name}", "PET_MASTER_PORT": "29400"})


def _read(manifest: str) -> _Job:
    *service, last = yaml.safe_load_all(manifest)
    if last["kind"] == "Job":
        return _indexed_job(*service, last)
    return {"JobSet": _job_set, "TrainJob": _train_job}[last["kind"]](last["metadata"]["name"], last["spec"])


def _expanded(word: str) -> str:
    """A word of a command without escapes; Kubernetes would also replace `$(NAME)`."""
    assert "$(" not in word.replace("$$", ""), "a variable: the manifest does not mean one"
    return word.replace("$$", "$")


class Kubelet:
    """Runs the pods of one Job, each index on a host of its own."""

    def __init__(self, manifest: str, hosts: Sequence[Host], folder: Path, env: Mapping[str, str]) -> None:
        self._job = _read(manifest)
        self._spec = self._job.spec
        self._pod = self._spec["template"]["spec"]
        (self._container,) = self._pod["containers"]
        assert self._spec["completionMode"] == "Indexed"
        assert self._spec["completions"] == self._spec["parallelism"] == len(hosts)
        self._hosts = [self._own_names(host, index) for index, host in enumerate(hosts)]
        self._folder, self._env = folder, env
        self.pods: dict[int, Tree] = {}
        self.said: list[str] = []
        """What pods that have ended had to say."""
        self.codes: list[int] = []
        """The exit codes of pods, in the order in which they ended."""
        self.counted = 0
        """How many of them were counted, by the Job or its JobSet."""
        self._starts_again = False
        self._disrupted: set[int] = set()
        self._kill_at: dict[int, float] = {}
        self._succeeded: set[int] = set()
        self.failed = False

    def start(self) -> None:
        """Start all pods."""
        for index in range(len(self._hosts)):
            self._start(index)

    def resolve(self) -> None:
        """Publish the pods' names."""
        names = "".join(
            f"{host.address} {self._job.name}-{index}.{self._job.subdomain}\n" for index, host in enumerate(self._hosts)
        )
        for host in self._hosts:
            with (host.folder / "hosts").open("a") as hosts:
                hosts.write(names)

    def lose(self, index: int) -> None:
        """Lose the node on which this pod runs."""
        self._disrupted.add(index)
        self.pods[index].die()

    def evict(self, index: int) -> None:
        """Drain the node on which this pod runs."""
        self._disrupted.add(index)
        self._terminate(index)

    def launcher(self, index: int) -> int:
        """The process id of a pod's container."""
        return self.pods[index].command.pid

    def until(self, enough: Callable[[], bool]) -> None:
        """Look after the pods until it is enough."""

        def is_enough() -> bool:
            if enough():
                return True
            self._sync()
            return False

        wait_until(is_enough, lambda: self, SECONDS)

    def run(self) -> bool:
        """Look after the pods until the Job is complete (True) or has failed, and no pod is left."""
        self.until(lambda: (self.failed and not self.pods) or len(self._succeeded) == len(self._hosts))
        return not self.failed

    def _start(self, index: int) -> None:
        env = {**self._env, "HOSTNAME": f"{self._job.name}-{index}", "JOB_COMPLETION_INDEX": str(index)}
        for each in self._container["env"]:
            env[each["name"]] = each["value"] if "value" in each else self._label(each["valueFrom"])
        if self._job.env:
            env |= self._job.env | {"PET_NODE_RANK": str(index)}
        self.pods[index] = self._hosts[index].start(
            "env", "-C", self._folder, *map(_expanded, self._container["command"]), env=env
        )

    def _label(self, source: Mapping[str, Any]) -> str:
        """The value of the one label that is asked for, the name of the JobSet."""
        assert source == {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}}
        return self._job.subdomain

    def _own_names(self, host: Host, index: int) -> Host:
        """The host with the pod's name, and a hosts file of its own: at first the pod's full name and short name."""
        name, folder = f"{self._job.name}-{index}", host.folder / f"{self._job.name}-{index}"
        folder.mkdir(exist_ok=True)
        full = f"{name}.{self._job.subdomain}.default.svc.cluster.local"
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{host.address} {full} {name}\n")
        (folder / "resolv.conf").write_text((host.folder / "resolv.conf").read_text())
        return replace(host, name=name, folder=folder)

    def _terminate(self, index: int) -> None:
        self._kill_at[index] = time.monotonic() + self._pod["terminationGracePeriodSeconds"]
        with suppress(psutil.NoSuchProcess, ValueError):  # it has just ended
            self.pods[index].send(SIGTERM)

    def _sync(self) -> None:
        for index, pod in list(self.pods.items()):
            if index in self._kill_at and time.monotonic() > self._kill_at[index]:
                pod.die()
            if not pod.ended:
                continue
            code = pod.wait(0)
            code = 128 - code if code < 0 else code  # as a shell and Kubernetes count a signal
            self.said.append(pod.output)
            self.codes.append(code)
            del self.pods[index]
            self._kill_at.pop(index, None)
            if code == 0:
                self._succeeded.add(index)
            elif not self.failed and not self._starts_again:
                self._after_failure(index, code)
        if self._starts_again and not self.pods:  # a JobSet makes the Job anew
            self._starts_again = False
            self._succeeded.clear()
            self.start()

    def _after_failure(self, index: int, code: int) -> None:
        action = next(
            (rule["action"] for rule in self._spec["podFailurePolicy"]["rules"] if self._matches(rule, index, code)),
            "Count",
        )
        self._disrupted.discard(index)
        self.counted += action == "Count"
        if action != "FailJob" and (action != "Count" or self.counted <= self._spec["backoffLimit"]):
            self._start(index)
            return
        # The Job has failed: JobSet's rule is about one that a pod's exit code has ended.
        self._starts_again = action != "FailJob" and self.counted <= (self._job.restarts or 0)
        self.failed = not self._starts_again
        for other in self.pods:
            self._terminate(other)

    def _matches(self, rule: Mapping[str, Any], index: int, code: int) -> bool:
        if "onPodConditions" in rule:
            return index in self._disrupted
        listed = code in rule["onExitCodes"]["values"]
        return listed if rule["onExitCodes"]["operator"] == "In" else not listed

    def __repr__(self) -> str:
        running = [f"--- pod {index}\n{pod.output[-3000:]}" for index, pod in self.pods.items()]
        return "\n".join([f"codes {self.codes}", *(said[-2000:] for said in self.said), *running])
