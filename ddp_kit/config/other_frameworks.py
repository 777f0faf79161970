"""Equivalents of other frameworks' arguments, for messages about unknown names. Imported only if a name is unknown.

The names are those of transformers 4 and 5 (TrainingArguments, Trainer), Lightning 1 and 2 (Trainer, ModelCheckpoint)
and Accelerate 1 (Accelerator, DataLoaderConfiguration), except names that are also names of ddpkit's settings.

The tables map each name to the end of a message. Code in a message is in backticks, and a test checks that this
code exists. If a message begins with code, this code is the nearest equivalent.
"""

from collections.abc import Mapping

_OPTIMIZER = "it belongs to the optimizer that you pass to the Trainer"
_LAUNCHER = "the launcher starts the processes: `ddpkit launch --gpus 2 train.py`"
_CPU = "not needed: training runs on the CPU if no GPU is visible, for example with CUDA_VISIBLE_DEVICES=''"
_FOLDER = '`checkpoint={"dir": "run"}`'
_COMPILE = '`compile="model"`, with the default backend and mode of torch'
_RECOMPUTE = '`memory={"activation_checkpointing": "blocks"}`'
_MOVED = '`parallel="fsdp"`, or the sizes of `parallel`: replicate, shard, tensor and pipeline'
_BF16 = '`precision="bf16"`'
_FP16 = '`precision="fp16"`, which always uses torch\'s autocast and gradient scaler'
_METRICS = (
    "not needed: the metrics of `Trainer(..., metrics=...)` are averaged exactly over all batches and ranks, and no "
    "outputs are stored"
)
_LOGGERS = "loggers are callbacks: `Trainer(..., callbacks=...)` with `TensorBoardLogger`, `WandbLogger` or another one"
_OF_LOGGER = (
    "it belongs to the logger, such as `WandbLogger`, `TrackioLogger` or `MLflowLogger`, in the Trainer's callbacks"
)
_PROGRESS = "not needed: the progress bar is only shown on a terminal"
_SCHEDULER = "it is an argument of the Trainer: `Trainer(..., scheduler=...)`; without one, the rate is constant"
_EPOCHS = (
    '`Trainer(..., scheduler_every="epoch")` for a scheduler that counts epochs; otherwise it counts optimizer steps'
)
_BEST = '`checkpoint.best_metric`, then `load_model(dir, model, which="best")` after the run'
_EXPORT = "not needed: checkpoints hold the whole state; `ddpkit export` writes the weights alone"
_DATA = "pass the data to `trainer.fit(train_data, eval_data)`"
_OWN_LOADER = "it belongs to your own DataLoader, which you pass to `trainer.fit(train_data, eval_data)`"
_DIVIDED = (
    "not needed: the Trainer divides the samples of a Dataset or DataLoader among the ranks, and uses each sample once"
)
_PART = "pass a part of the data, such as `torch.utils.data.Subset(data, range(100))`"
_BATCH_AS_IT_IS = "not needed: the loss function gets each batch as the dataset or DataLoader returns it"
_HUB = "not supported: `trainer.model` is your own object; call its method for uploads"
_GENERATE = "not built in: call the model's generate method in the predict_fn of `trainer.predict(data, predict_fn)`"
_LENGTHS = "`TokenBatchSampler(lengths, tokens=4096)`, as the batch_sampler of your own DataLoader"
_FOLDED = "not supported: use " + _MOVED + "; for offload, use the settings of `memory`"
_ANOMALY = "not built in: call `torch.autograd.set_detect_anomaly(True)` in the script"
_MICRO = (
    "`micro_batch_size` (samples per rank and pass); `global_batch_size` counts the samples of all ranks and passes"
)
_EVAL_BATCH = "evaluations use `micro_batch_size`, or the batch size of a DataLoader that you pass as eval_data"
_WHEN_TO_EVALUATE = "`eval_every_steps` (optimizer steps) or `eval_every_epochs`; default: after each epoch"
_TOKENS = (
    "`Loss(sum, weight=tokens)` as the return value of the loss function, for an average over the tokens of all ranks"
)
_SMOOTHING = "it belongs in the loss function: `torch.nn.functional.cross_entropy(..., label_smoothing=0.1)`"
_RANK_0 = "not needed: ddpkit logs on rank 0; `ddpkit launch --local-ranks-filter 0 train.py` hides other ranks' output"
_CALLBACK_STATE = "not needed: checkpoints hold the state of each `Callback` that has a state_dict"
_SYNC_BATCH_NORM = "convert the model before you create the Trainer: `torch.nn.SyncBatchNorm.convert_sync_batchnorm`"
_STREAM = "not supported: use an IterableDataset, because its __iter__ is called in each epoch"
_PER_NODE = (
    "the launcher starts the processes; pass their number per node: `ddpkit launch --nnodes 2 --gpus 4 train.py`"
)
_GLOBAL = "not needed: `global_batch_size` counts the samples of all ranks"
_LOGS = "`TensorBoardLogger(dir)`, in the Trainer's callbacks"
_ON_GRADIENTS = "`Callback.on_gradients`, which may change the reduced gradients at every placement"
_STATIC_GRAPH = (
    "not needed: DDP expects a gradient of every parameter in each step; `parallel.find_unused_parameters` makes it "
    "search for parameters without one"
)
_UNSUPPORTED = "not supported, and there is no equivalent"


def _table(texts: Mapping[str, str]) -> dict[str, str]:
    """Map each name to its text. `texts`: a dict from each text to one or more names, separated by spaces."""
    return {name: text for text, names in texts.items() for name in names.split()}


_ANY = _table(
    {
        _OPTIMIZER: "lr learning_rate weight_decay momentum betas eps optimizer optim",
        "it is an argument of the Trainer: Trainer(..., model=...)": "model",
        "it is an argument of the Trainer: Trainer(..., loss_fn=...)": "loss_fn loss criterion",
        "it is an argument of the Trainer: Trainer(..., scheduler=...)": "scheduler lr_scheduler",
        "it is an argument of the Trainer: Trainer(..., scheduler_every=...)": "scheduler_every",
        "it is an argument of the Trainer: Trainer(..., metrics=...)": "metrics",
        "it is an argument of the Trainer: Trainer(..., callbacks=...)": "callbacks",
        "it is an argument of the Trainer: Trainer(..., updates=...)": "updates optimizers",
        "it is an argument of the Trainer: Trainer(..., parallelize=...)": "parallelize",
        _LAUNCHER: "devices gpus n_gpu n_gpus num_gpus nodes num_nodes nnodes nproc_per_node accelerator world_size",
        '`precision="fp16"`': "fp16",
        _BF16: "bf16 amp mixed_precision use_amp autocast",
        '`precision="tf32"`': "tf32",
        '`precision="fp8"`': "fp8",
        "`epochs`": "num_epochs n_epochs max_epoch",
        "`global_batch_size` (samples per optimizer step), or `micro_batch_size` (per rank and pass)": "batch_size",
        _FOLDER: "save_dir checkpoint_dir ckpt_dir",
        "`checkpoint.every_steps`": "save_every",
        "`checkpoint.resume`": "resume",
        "`max_grad_norm`": "grad_clip clip_grad clip_grad_norm gradient_clip clip_norm",
        "`EarlyStopping`, in the Trainer's callbacks": "patience early_stopping",
        "`accumulation_steps`": "grad_accum grad_accumulation_steps accumulate_grad accum_steps",
        _RECOMPUTE: "activation_checkpointing gradient_checkpointing",
        _DATA: "train_data eval_data train_loader val_loader train_dataloader eval_dataloader val_dataloader dataset",
    }
)

_HUGGING_FACE = _table(
    {
        _FOLDER: "output_dir",
        _LOGS: "logging_dir",
        '`checkpoint={"dir": "run", "resume": None}` starts from step 0': "overwrite_output_dir",
        "call `trainer.fit`, `trainer.evaluate` or `trainer.predict`": "do_train do_eval do_predict",
        _WHEN_TO_EVALUATE: "eval_strategy evaluation_strategy evaluate_during_training",
        "`eval_every_steps` (optimizer steps)": "eval_steps",
        "not built in: call `trainer.evaluate` in a loop over `trainer.steps`": "eval_delay",
        "`sanity_check` evaluates one batch before step 1; `trainer.evaluate` evaluates all data": "eval_on_start",
        _MICRO: "per_device_train_batch_size per_gpu_train_batch_size",
        _EVAL_BATCH: "per_device_eval_batch_size per_gpu_eval_batch_size",
        '`micro_batch_size="auto"`': "auto_find_batch_size",
        "`accumulation_steps`": "gradient_accumulation_steps",
        _METRICS: "compute_metrics prediction_loss_only eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps include_for_metrics include_inputs_for_metrics batch_eval_metrics "
        "preprocess_logits_for_metrics",
        _OPTIMIZER: "optim optim_args optim_target_modules optimizer_cls_and_kwargs adafactor adam_beta1 "
        "adam_beta2 adam_epsilon",
        "`epochs`": "num_train_epochs",
        _SCHEDULER: "lr_scheduler_type lr_scheduler_kwargs",
        "`warmup_steps` (optimizer steps)": "warmup_ratio",
        _TOKENS: "average_tokens_across_devices",
        _SMOOTHING: "label_smoothing_factor",
        "it is an argument of the Trainer: `Trainer(..., loss_fn=...)`": "compute_loss_func",
        _FP16: "fp16_opt_level fp16_backend half_precision_backend",
        "not supported: evaluations use `precision`, as training does": "bf16_full_eval fp16_full_eval",
        _RECOMPUTE: "activation_checkpointing_kwargs gradient_checkpointing_kwargs",
        _COMPILE: "torch_compile torch_compile_backend torch_compile_mode torchdynamo",
        "it changes the model: apply it before you create the Trainer": "use_liger_kernel liger_kernel_config "
        "neftune_noise_alpha use_cache",
        "not built in: call `torch.cuda.empty_cache()` in a `Callback`": "torch_empty_cache_steps",
        "`log_every_steps` (optimizer steps)": "logging_strategy logging_steps logging_first_step",
        "`non_finite_gradients`, which stops the run or skips the step": "logging_nan_inf_filter",
        _RANK_0: "log_on_each_node log_level log_level_replica",
        "not built in: log token counts with `trainer.log` in the loss function": "include_num_input_tokens_seen "
        "include_tokens_per_second",
        "not needed: each log row has the peak memory of the GPUs": "skip_memory_metrics",
        _PROGRESS: "disable_tqdm",
        _LOGGERS: "report_to",
        _OF_LOGGER: "run_name project trackio_space_id trackio_bucket_id trackio_static_space_id",
        '`checkpoint={"dir": "run", "every_steps": 500}`': "save_strategy",
        "`checkpoint.every_steps`": "save_steps",
        "`checkpoint.keep_last`": "save_total_limit",
        _EXPORT: "save_only_model save_safetensors",
        "not needed: ranks that share a folder write a checkpoint together": "save_on_each_node",
        "not needed: after SIGTERM, a run with `checkpoint.dir` saves a checkpoint and ends": "enable_jit_checkpoint",
        "`checkpoint.resume`": "resume_from_checkpoint",
        _BEST: "load_best_model_at_end",
        "`checkpoint.best_metric`": "metric_for_best_model",
        '`checkpoint.best_mode`: "min" or "max"': "greater_is_better",
        "not supported: a resumed run continues at the saved position in the data": "ignore_data_skip",
        _CALLBACK_STATE: "restore_callback_states_from_checkpoint",
        _HUB: "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
        "push_to_hub_model_id push_to_hub_organization push_to_hub_token",
        "`deterministic`": "full_determinism",
        "`seed`, which also determines the data order": "data_seed",
        _CPU: "use_cpu no_cuda use_mps_device",
        _MOVED: "fsdp fsdp_config fsdp_min_num_params accelerator_config parallelism_config sharded_ddp",
        "`parallel.fsdp_units`": "fsdp_transformer_layer_cls_to_wrap",
        _FOLDED: "deepspeed",
        "`data.drop_last`": "dataloader_drop_last",
        "`data.num_workers`": "dataloader_num_workers",
        "`data.pin_memory`": "dataloader_pin_memory",
        "not needed: DataLoader workers persist": "dataloader_persistent_workers",
        _OWN_LOADER: "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order",
        _LENGTHS: "group_by_length train_sampling_strategy length_column_name sortish_sampler",
        _BATCH_AS_IT_IS: "remove_unused_columns label_names",
        "`parallel.find_unused_parameters`": "ddp_find_unused_parameters",
        "`parallel.bucket_mb`": "ddp_bucket_cap_mb",
        _STATIC_GRAPH: "ddp_static_graph static_graph",
        "not needed: buffers of rank 0 are broadcast once per step": "ddp_broadcast_buffers",
        "not needed: collectives use NCCL on GPUs and gloo on the CPU": "ddp_backend xpu_backend",
        "`ddpkit launch --hang-timeout 600 train.py`, in seconds without progress": "ddp_timeout",
        _ANOMALY: "debug",
        "the launcher sets it: `trainer.world.local_rank`": "local_rank",
        _DIVIDED: "dispatch_batches",
        _GLOBAL: "split_batches",
        _GENERATE: "predict_with_generate generation_max_length generation_num_beams generation_config",
        _UNSUPPORTED: "jit_mode_eval use_ipex past_index mp_parameters ray_scope tpu_num_cores tpu_metrics_debug "
        "use_legacy_prediction_loop",
        # Arguments of Hugging Face's Trainer:
        "pass settings as a TrainerConfig: `Trainer(..., config=TrainerConfig(epochs=3))`": "args",
        "they are arguments of the Trainer: `Trainer(model, optimizer, loss_fn, scheduler=...)`": "optimizers",
        "`data.collate_fn`": "data_collator",
        _DATA: "train_dataset eval_dataset",
        "not needed: apply it in the dataset, or in `data.collate_fn`": "processing_class tokenizer",
        "not needed: create the model, and pass it to the Trainer": "model_init",
        # Events of callbacks:
        _ON_GRADIENTS: "on_pre_optimizer_step",
        "`Callback.on_step`, which is called after the update": "on_optimizer_step",
    }
)

_LIGHTNING = _table(
    {
        _LAUNCHER: "num_processes",
        "`parallel.strategy`": "strategy distributed_backend",
        "`ddpkit launch --gpus free:2 train.py`": "auto_select_gpus",
        "not supported: ddpkit trains only on GPUs and CPUs": "tpu_cores ipus hpus",
        _LOGGERS: "logger",
        "`max_steps`; `sanity_check` evaluates one batch before the first step in any case": "fast_dev_run",
        "`epochs`": "max_epochs",
        "not supported: a run ends at `epochs` or `max_steps`, or after `trainer.stop`": "min_epochs min_steps",
        "`max_seconds`, as a number": "max_time",
        "`max_steps`; or " + _PART: "limit_train_batches",
        _PART: "limit_val_batches limit_test_batches limit_predict_batches overfit_batches",
        "`eval_every_steps` (optimizer steps)": "val_check_interval",
        "`eval_every_epochs`": "check_val_every_n_epoch",
        '`sanity_check`: "auto" or "off"': "num_sanity_val_steps",
        "`log_every_steps` (optimizer steps)": "log_every_n_steps row_log_interval",
        _FOLDER: "enable_checkpointing checkpoint_callback default_root_dir weights_save_path dirpath",
        _PROGRESS: "enable_progress_bar progress_bar_refresh_rate process_position",
        "not needed: the first log line describes the model": "enable_model_summary weights_summary",
        "`accumulation_steps`": "accumulate_grad_batches",
        "`max_grad_norm`": "gradient_clip_val",
        "`max_grad_norm` clips by norm, `max_grad_value` by value": "gradient_clip_algorithm",
        "not built in: set `torch.backends.cudnn.benchmark` in the script": "benchmark",
        "not needed: evaluations and predictions compute no gradients": "inference_mode",
        _DIVIDED: "use_distributed_sampler replace_sampler_ddp",
        '`profile={"steps": (10, 12)}`': "profiler",
        _ANOMALY: "detect_anomaly",
        "not needed: leave out callbacks and checkpoints": "barebones",
        _UNSUPPORTED: "plugins model_registry truncated_bptt_steps multiple_trainloader_mode amp_backend amp_level "
        "move_metrics_to_cpu prepare_data_per_node",
        _SYNC_BATCH_NORM: "sync_batchnorm",
        _STREAM: "reload_dataloaders_every_n_epochs reload_dataloaders_every_epoch",
        "not needed: a run with `checkpoint.dir` saves all settings in this folder": "enable_autolog_hparams",
        '`micro_batch_size="auto"`': "auto_scale_batch_size",
        "`trainer.find_learning_rate(train_data)`": "auto_lr_find",
        "not needed: each log row has the gradient norm": "track_grad_norm",
        "not needed: each log row has the peak memory of the GPUs": "log_gpu_memory",
        "`non_finite_gradients`, which stops the run or skips the step": "terminate_on_nan",
        "`EMA`, in the Trainer's callbacks": "stochastic_weight_avg",
        _OF_LOGGER: "flush_logs_every_n_steps",
        "`checkpoint.resume`": "resume_from_checkpoint ckpt_path",
        # Arguments of Lightning's `fit`, schedulers and ModelCheckpoint:
        _DATA: "train_dataloaders val_dataloaders datamodule",
        _EPOCHS: "interval frequency",
        _EXPORT: "weights_only save_weights_only",
        "not supported: the folder of a checkpoint is named after the step": "filename",
        "`checkpoint.best_metric`": "monitor",
        "`checkpoint.keep_last` (newest checkpoints) and `checkpoint.best_metric` (also the best one)": "save_top_k",
        '`checkpoint.best_mode`: "min" or "max"': "mode",
        "not needed: the newest checkpoint is always kept": "save_last",
        "`checkpoint.every_steps`": "every_n_train_steps",
        "`checkpoint.every_steps`, in optimizer steps": "every_n_epochs",
        "`checkpoint.every_seconds`": "train_time_interval",
        # Events of callbacks:
        _ON_GRADIENTS: "on_before_optimizer_step on_after_backward",
    }
)

_ACCELERATE = _table(
    {
        "not needed: the Trainer moves the model and each batch to the device of its rank": "device_placement",
        _GLOBAL: "split_batches",
        "`accumulation_steps`": "gradient_accumulation_steps gradient_accumulation_plugin",
        _CPU: "cpu use_cpu",
        '`data`, such as `data={"num_workers": 4}`': "dataloader_config",
        _FOLDED: "deepspeed_plugin deepspeed_plugins megatron_lm_plugin",
        _MOVED: "fsdp_plugin parallelism_config",
        "`parallel.tensor`": "torch_tp_plugin",
        "not needed: `seed` sets all random states, and checkpoints hold them": "rng_types",
        _LOGGERS: "log_with",
        _FOLDER: "project_dir project_config",
        _LOGS: "logging_dir",
        _EPOCHS: "step_scheduler_with_optimizer",
        "not supported: use the settings `precision` and `parallel` instead": "kwargs_handlers",
        _COMPILE: "dynamo_backend dynamo_plugin",
        _PER_NODE: "num_processes num_machines",
        _DIVIDED: "dispatch_batches even_batches use_seedable_sampler",
        "`data.pin_memory`, which makes copies to the GPU non-blocking": "non_blocking",
        "pass a StatefulDataLoader itself to `trainer.fit(train_data, eval_data)`": "use_stateful_dataloader",
        "`seed`, which also determines the data order": "data_seed",
    }
)

_BY_FRAMEWORK = {
    "Hugging Face": _HUGGING_FACE,
    "Lightning": _LIGHTNING,
    "Accelerate": _ACCELERATE,
}


def equivalent(name: str) -> str | None:
    """The replacement for a name of another framework, as text for a message; None for an unknown name.

    If the name has different meanings in several frameworks, the text has one replacement for each framework.
    """
    found = {framework: table[name] for framework, table in _BY_FRAMEWORK.items() if name in table}
    if not found:
        return _shown(_ANY[name]) if name in _ANY else None
    if len(set(found.values())) == 1:
        return _shown(next(iter(found.values())))
    return "; ".join(f"as in {framework}: {_shown(text)}" for framework, text in found.items())


def _shown(text: str) -> str:
    return f"use {text.replace('`', '')}" if text.startswith("`") else text
