"""Print the runs that MLflow has in this folder, as JSON."""

import json

import mlflow

mlflow.set_tracking_uri("file:./mlruns")
client = mlflow.tracking.MlflowClient()
runs = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
print(
    json.dumps(
        [
            {
                "name": run.info.run_name,
                "status": run.info.status,
                "params": run.data.params,
                "train": [each.step for each in client.get_metric_history(run.info.run_id, "train/loss")],
                "eval": [each.step for each in client.get_metric_history(run.info.run_id, "eval/loss")],
            }
            for run in runs
        ]
    )
)
