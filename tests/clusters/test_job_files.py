"""The files in launch/: written by `ddpkit submit`, and valid to the engines' own schemas."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_kit.clusters import kubeflow
from ddp_kit.clusters.request import AGAIN, COUNTED, Request
from tests.support.launching import BIN, ROOT, free_port, seconds
from tests.support.submitted import job_file

LAUNCH = ROOT / "launch"
_IMAGE = "--image registry.example.com/me/train:1"
JOB_FILES = {
    "slurm/train.sbatch": "--on slurm --nodes 2 --gpus 8 --time 24h --requeue",
    "kubernetes/job.yaml": f"--on kubernetes --nodes 2 --gpus 8 {_IMAGE} train.py",
    "jobset/jobset.yaml": f"--on jobset --nodes 2 --gpus 8 {_IMAGE} train.py",
    "kubeflow/train-job.yaml": f"--on kubeflow --nodes 2 --gpus 8 {_IMAGE} train.py",
    "skypilot/task.yaml": "--on skypilot --nodes 2 --gpus H100:8 train.py",
    "ray/submit.sh": "--on ray --nodes 2 --gpus 8 train.py",
}
"""The files, each with the words after `ddpkit submit` that print it."""
RUNTIME = LAUNCH / "kubeflow" / "runtime.yaml"


pytestmark = pytest.mark.usefixtures("script")


@pytest.mark.parametrize("path", JOB_FILES)
def test_launch_file_equals_output_of_submit(path: str) -> None:
    assert (LAUNCH / path).read_text() == job_file(*JOB_FILES[path].split()) + "\n"


def test_kubeflow_runtime_file_equals_generated_runtime() -> None:
    request = Request(nodes=1, words=(), name="node", command="...", image="ddpkit", grace=120)
    assert _without_comments(RUNTIME.read_text()) == _without_comments(kubeflow.runtime(request))


def _without_comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def _documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / path).read_text()))


def _is_valid_job(spec: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, "spec": spec}
    for version in ("1.31", "1.37"):
        validate(job, version, strict=True)


def test_kubernetes_manifest_matches_schema() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    service, job = _documents("kubernetes/job.yaml")
    validate(service, "1.37", strict=True)
    assert job.keys() == {"apiVersion", "kind", "metadata", "spec"}
    _is_valid_job(job["spec"])


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("jobset/jobset.yaml", "JobsetV1alpha2JobSet"),
        ("kubeflow/train-job.yaml", "TrainerV1alpha1TrainJob"),
        ("kubeflow/runtime.yaml", "TrainerV1alpha1ClusterTrainingRuntime"),
    ],
)
def test_custom_resources_match_their_models(path: str, model: str) -> None:
    """The models ignore fields that they do not know: what they have read has to be all."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (document,) = _documents(path)
    assert getattr(models, model).from_dict(document).to_dict() == document
    spec = document["spec"].get("template", document)["spec"]
    for replicated in spec.get("replicatedJobs", []):
        _is_valid_job(replicated["template"]["spec"])


def test_skypilot_task_matches_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schemas = json.loads((Path(__file__).parent / "skypilot-0.14.1-schemas.json").read_text())
    (task,) = _documents("skypilot/task.yaml")
    jsonschema.validate(task, schemas["task"])
    jsonschema.validate(task["resources"], schemas["resources"])
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == list(AGAIN)


def test_aws_batch_job_definition_matches_schema() -> None:
    pytest.importorskip("botocore")
    from botocore.session import Session
    from botocore.validate import ParamValidator  # type: ignore[import-untyped]

    definition = json.loads((LAUNCH / "aws-batch" / "job-definition.json").read_text())
    shape = Session().get_service_model("batch").operation_model("RegisterJobDefinition").input_shape
    report = ParamValidator().validate(definition, shape)
    assert not report.has_errors(), report.generate_report()
    rules = definition["retryStrategy"]["evaluateOnExit"]
    again = {rule["onExitCode"] for rule in rules if rule["action"] == "RETRY" and "onExitCode" in rule}
    assert again >= {str(code) for code in (*AGAIN, *COUNTED)}
    assert rules[-1]["action"] == "EXIT", "any other code ends the job"


@pytest.mark.slow
def test_torchx_starts_the_component(tmp_path: Path) -> None:
    torchx = BIN / "torchx"
    if not torchx.exists():
        pytest.skip("TorchX is not installed: pip install torchx")
    (tmp_path / "train.py").write_text("import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1:])")
    page = (ROOT / "docs" / "clusters.md").read_text()
    (tmp_path / "component.py").write_text(page.partition("```py\n")[2].partition("```")[0])
    flags = ["--wait", "-s", "local_cwd"]
    asked = ["--script", "train.py", "--nodes", "2", "--port", str(free_port())]
    words = [str(torchx), "run", *flags, "component.py:ddpkit", *asked, "--", "a b"]
    env = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=seconds(120))
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} ['a b']" in done.stderr
