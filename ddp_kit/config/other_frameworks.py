"""Equivalents of other frameworks' arguments, for messages about unknown names. Imported only if a name is unknown.

The names are those of transformers 4 and 5 (TrainingArguments, Trainer), Lightning 1 and 2 (Trainer, ModelCheckpoint)
and Accelerate 1 (Accelerator, DataLoaderConfiguration), and common names in scripts, except names that are also names
of ddpkit's settings.
"""

_NAMES_BY_EQUIVALENT = {
    # Arguments of the Trainer
    "it is an argument of the Trainer: Trainer(..., model=...)": "model",
    "it is an argument of the Trainer: Trainer(..., loss_fn=...)": "loss_fn loss criterion compute_loss_func",
    "it is an argument of the Trainer: Trainer(..., scheduler=...)": "scheduler lr_scheduler",
    "it is an argument of the Trainer: `Trainer(..., scheduler=...)`; without one, the rate is constant": (
        "lr_scheduler_type lr_scheduler_kwargs"
    ),
    "it is an argument of the Trainer: Trainer(..., scheduler_every=...)": "scheduler_every",
    (
        '`Trainer(..., scheduler_every="epoch")` for a scheduler that counts epochs; otherwise it counts '
        "optimizer steps"
    ): "interval frequency step_scheduler_with_optimizer",
    "it is an argument of the Trainer: Trainer(..., metrics=...)": "metrics",
    "it is an argument of the Trainer: Trainer(..., callbacks=...)": "callbacks",
    "it is an argument of the Trainer: Trainer(..., updates=...)": "updates",
    "it is an argument of the Trainer: Trainer(..., parallelize=...)": "parallelize",
    "they are arguments of the Trainer: `Trainer(model, optimizer, loss_fn, scheduler=...)`": "optimizers",
    "pass settings as a TrainerConfig: `Trainer(..., config=TrainerConfig(epochs=3))`": "args",
    "not needed: create the model, and pass it to the Trainer": "model_init",
    # Processes and devices
    "the launcher starts the processes: `ddpkit launch --gpus 2 train.py`": (
        "devices gpus n_gpu n_gpus num_gpus nodes num_nodes nnodes nproc_per_node accelerator world_size"
    ),
    "the launcher starts the processes; pass their number per node: `ddpkit launch --nnodes 2 --gpus 4 train.py`": (
        "num_processes num_machines"
    ),
    "`ddpkit launch --gpus free:2 train.py`": "auto_select_gpus",
    "not supported: ddpkit trains only on GPUs and CPUs": "tpu_cores ipus hpus",
    "not needed: training runs on the CPU if no GPU is visible, for example with CUDA_VISIBLE_DEVICES=''": (
        "use_cpu no_cuda use_mps_device cpu"
    ),
    "the launcher sets it: `trainer.world.local_rank`": "local_rank",
    "`ddpkit launch --hang-timeout 600 train.py`, in seconds without progress": "ddp_timeout",
    "not needed: collectives use NCCL on GPUs and gloo on the CPU": "ddp_backend xpu_backend",
    "not needed: the Trainer moves the model and each batch to the device of its rank": "device_placement",
    # Precision and compilation
    '`precision="fp16"`': "fp16",
    '`precision="fp16"`, which always uses torch\'s autocast and gradient scaler': (
        "fp16_opt_level fp16_backend half_precision_backend"
    ),
    '`precision="bf16"`': "bf16 amp mixed_precision use_amp autocast",
    '`precision="tf32"`': "tf32",
    '`precision="fp8"`': "fp8",
    "not supported: evaluations use `precision`, as training does": "bf16_full_eval fp16_full_eval",
    '`compile="model"`, with the default backend and mode of torch': (
        "torch_compile torch_compile_backend torch_compile_mode torchdynamo dynamo_backend dynamo_plugin"
    ),
    "it changes the model: apply it before you create the Trainer": (
        "use_liger_kernel liger_kernel_config neftune_noise_alpha use_cache"
    ),
    "convert the model before you create the Trainer: `torch.nn.SyncBatchNorm.convert_sync_batchnorm`": (
        "sync_batchnorm"
    ),
    # Length of a run
    "`epochs`": "num_epochs n_epochs max_epoch num_train_epochs max_epochs",
    "`max_steps`; `sanity_check` evaluates one batch before the first step in any case": "fast_dev_run",
    "not supported: a run ends at `epochs` or `max_steps`, or after `trainer.stop`": "min_epochs min_steps",
    "`max_seconds`, as a number": "max_time",
    "`max_steps`; or pass a part of the data, such as `torch.utils.data.Subset(data, range(100))`": (
        "limit_train_batches"
    ),
    "pass a part of the data, such as `torch.utils.data.Subset(data, range(100))`": (
        "limit_val_batches limit_test_batches limit_predict_batches overfit_batches"
    ),
    "call `trainer.fit`, `trainer.evaluate` or `trainer.predict`": "do_train do_eval do_predict",
    '`checkpoint={"dir": "run", "resume": None}` starts from step 0': "overwrite_output_dir",
    # Batches
    "`global_batch_size` (samples per optimizer step), or `micro_batch_size` (per rank and pass)": "batch_size",
    "`micro_batch_size` (samples per rank and pass); `global_batch_size` counts the samples of all ranks and passes": (
        "per_device_train_batch_size per_gpu_train_batch_size"
    ),
    "evaluations use `micro_batch_size`, or the batch size of a DataLoader that you pass as eval_data": (
        "per_device_eval_batch_size per_gpu_eval_batch_size"
    ),
    '`micro_batch_size="auto"`': "auto_find_batch_size auto_scale_batch_size",
    "`accumulation_steps`": (
        "grad_accum grad_accumulation_steps accumulate_grad accum_steps gradient_accumulation_steps "
        "accumulate_grad_batches gradient_accumulation_plugin"
    ),
    "not needed: `global_batch_size` counts the samples of all ranks": "split_batches",
    # Evaluation
    "`eval_every_steps` (optimizer steps) or `eval_every_epochs`; default: after each epoch": (
        "eval_strategy evaluation_strategy evaluate_during_training"
    ),
    "`eval_every_steps` (optimizer steps)": "eval_steps val_check_interval",
    "`eval_every_epochs`": "check_val_every_n_epoch",
    "not built in: call `trainer.evaluate` in a loop over `trainer.steps`": "eval_delay",
    "`sanity_check` evaluates one batch before step 1; `trainer.evaluate` evaluates all data": "eval_on_start",
    '`sanity_check`: "auto" or "off"': "num_sanity_val_steps",
    (
        "not needed: the metrics of `Trainer(..., metrics=...)` are averaged exactly over all batches and "
        "ranks, and no outputs are stored"
    ): (
        "compute_metrics prediction_loss_only eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps include_for_metrics include_inputs_for_metrics batch_eval_metrics "
        "preprocess_logits_for_metrics"
    ),
    "not needed: evaluations and predictions compute no gradients": "inference_mode",
    # Optimizer, learning rate, loss and gradients
    "it belongs to the optimizer that you pass to the Trainer": (
        "lr learning_rate weight_decay momentum betas eps optimizer optim optim_args optim_target_modules "
        "optimizer_cls_and_kwargs adafactor adam_beta1 adam_beta2 adam_epsilon"
    ),
    "`warmup_steps` (optimizer steps)": "warmup_ratio",
    "`trainer.find_learning_rate(train_data)`": "auto_lr_find",
    "`max_grad_norm`": "grad_clip clip_grad clip_grad_norm gradient_clip clip_norm gradient_clip_val",
    "`max_grad_norm` clips by norm, `max_grad_value` by value": "gradient_clip_algorithm",
    "`non_finite_gradients`, which stops the run or skips the step": "logging_nan_inf_filter terminate_on_nan",
    (
        "`Loss(sum, weight=tokens)` as the return value of the loss function, for an average over the tokens "
        "of all ranks"
    ): "average_tokens_across_devices",
    "it belongs in the loss function: `torch.nn.functional.cross_entropy(..., label_smoothing=0.1)`": (
        "label_smoothing_factor"
    ),
    "not needed: each log row has the gradient norm": "track_grad_norm",
    "`Callback.on_gradients`, which may change the reduced gradients at every placement": (
        "on_pre_optimizer_step on_before_optimizer_step on_after_backward"
    ),
    "`Callback.on_step`, which is called after the update": "on_optimizer_step",
    "`EMA`, in the Trainer's callbacks": "stochastic_weight_avg",
    # Logs
    "`log_every_steps` (optimizer steps)": (
        "logging_strategy logging_steps logging_first_step log_every_n_steps row_log_interval"
    ),
    "not needed: ddpkit logs on rank 0; `ddpkit launch --local-ranks-filter 0 train.py` hides other ranks' output": (
        "log_on_each_node log_level log_level_replica"
    ),
    "not built in: log token counts with `trainer.log` in the loss function": (
        "include_num_input_tokens_seen include_tokens_per_second"
    ),
    "not needed: each log row has the peak memory of the GPUs": "skip_memory_metrics log_gpu_memory",
    "not needed: the progress bar is only shown on a terminal": (
        "disable_tqdm enable_progress_bar progress_bar_refresh_rate process_position"
    ),
    "loggers are callbacks: `Trainer(..., callbacks=...)` with `TensorBoardLogger`, `WandbLogger` or another one": (
        "report_to logger log_with"
    ),
    "it belongs to the logger, such as `WandbLogger`, `TrackioLogger` or `MLflowLogger`, in the Trainer's callbacks": (
        "run_name project trackio_space_id trackio_bucket_id trackio_static_space_id flush_logs_every_n_steps"
    ),
    "`TensorBoardLogger(dir)`, in the Trainer's callbacks": "logging_dir",
    "not needed: the first log line describes the model": "enable_model_summary weights_summary",
    "not needed: a run with `checkpoint.dir` saves all settings in this folder": "enable_autolog_hparams",
    '`profile={"steps": (10, 12)}`': "profiler",
    "not built in: call `torch.autograd.set_detect_anomaly(True)` in the script": "debug detect_anomaly",
    # Checkpoints
    '`checkpoint={"dir": "run"}`': (
        "save_dir checkpoint_dir ckpt_dir output_dir enable_checkpointing checkpoint_callback "
        "default_root_dir weights_save_path dirpath project_dir project_config"
    ),
    '`checkpoint={"dir": "run", "every_steps": 500}`': "save_strategy",
    "`checkpoint.every_steps`": "save_every save_steps every_n_train_steps",
    "`checkpoint.every_steps`, in optimizer steps": "every_n_epochs",
    "`checkpoint.every_seconds`": "train_time_interval",
    "`checkpoint.keep_last`": "save_total_limit",
    "not needed: the newest checkpoint is always kept": "save_last",
    "`checkpoint.keep_last` (newest checkpoints) and `checkpoint.best_metric` (also the best one)": "save_top_k",
    "not needed: checkpoints hold the whole state; `ddpkit export` writes the weights alone": (
        "save_only_model save_safetensors weights_only save_weights_only"
    ),
    "not needed: ranks that share a folder write a checkpoint together": "save_on_each_node",
    "not needed: after SIGTERM, a run with `checkpoint.dir` saves a checkpoint and ends": "enable_jit_checkpoint",
    "`checkpoint.resume`": "resume resume_from_checkpoint ckpt_path",
    "not supported: a resumed run continues at the saved position in the data": "ignore_data_skip",
    '`checkpoint.best_metric`, then `load_model(dir, model, which="best")` after the run': "load_best_model_at_end",
    "`checkpoint.best_metric`": "metric_for_best_model monitor",
    '`checkpoint.best_mode`: "min" or "max"': "greater_is_better mode",
    "`EarlyStopping`, in the Trainer's callbacks": "patience early_stopping",
    "not needed: checkpoints hold the state of each `Callback` that has a state_dict": (
        "restore_callback_states_from_checkpoint"
    ),
    "not supported: the folder of a checkpoint is named after the step": "filename",
    "not supported: `trainer.model` is your own object; call its method for uploads": (
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
        "push_to_hub_model_id push_to_hub_organization push_to_hub_token"
    ),
    # Placement and memory
    '`parallel="fsdp"`, or the sizes of `parallel`: replicate, shard, tensor and pipeline': (
        "fsdp fsdp_config fsdp_min_num_params accelerator_config parallelism_config sharded_ddp fsdp_plugin"
    ),
    "`parallel.strategy`": "strategy distributed_backend",
    "`parallel.fsdp_units`": "fsdp_transformer_layer_cls_to_wrap",
    "`parallel.tensor`": "torch_tp_plugin",
    (
        'not supported: use `parallel="fsdp"`, or the sizes of `parallel`: replicate, shard, tensor and '
        "pipeline; for offload, use the settings of `memory`"
    ): "deepspeed deepspeed_plugin deepspeed_plugins megatron_lm_plugin",
    "`parallel.find_unused_parameters`": "ddp_find_unused_parameters",
    "`parallel.bucket_mb`": "ddp_bucket_cap_mb",
    (
        "not needed: DDP expects a gradient of every parameter in each step; with "
        "`parallel.find_unused_parameters`, it searches for parameters without one"
    ): "ddp_static_graph static_graph",
    "not needed: buffers of rank 0 are broadcast once per step": "ddp_broadcast_buffers",
    '`memory={"activation_checkpointing": "blocks"}`': (
        "activation_checkpointing gradient_checkpointing activation_checkpointing_kwargs gradient_checkpointing_kwargs"
    ),
    # Data and seeds
    "pass the data to `trainer.fit(train_data, eval_data)`": (
        "train_data eval_data train_loader val_loader train_dataloader eval_dataloader val_dataloader "
        "dataset train_dataset eval_dataset train_dataloaders val_dataloaders datamodule"
    ),
    "`data.collate_fn`": "data_collator",
    "not needed: apply it in the dataset, or in `data.collate_fn`": "processing_class tokenizer",
    "`data.drop_last`": "dataloader_drop_last",
    "`data.num_workers`": "dataloader_num_workers",
    "`data.pin_memory`": "dataloader_pin_memory",
    "`data.pin_memory`, which makes copies to the GPU non-blocking": "non_blocking",
    "not needed: DataLoader workers persist": "dataloader_persistent_workers",
    "it belongs to your own DataLoader, which you pass to `trainer.fit(train_data, eval_data)`": (
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order"
    ),
    "`TokenBatchSampler(lengths, tokens=4096)`, as the batch_sampler of your own DataLoader": (
        "group_by_length train_sampling_strategy length_column_name sortish_sampler"
    ),
    "not needed: the loss function gets each batch as the dataset or DataLoader returns it": (
        "remove_unused_columns label_names"
    ),
    (
        "not needed: the Trainer divides the samples of a Dataset or DataLoader among the ranks, and uses "
        "each sample once"
    ): "dispatch_batches use_distributed_sampler replace_sampler_ddp even_batches use_seedable_sampler",
    "not supported: use an IterableDataset, because its __iter__ is called in each epoch": (
        "reload_dataloaders_every_n_epochs reload_dataloaders_every_epoch"
    ),
    "pass a StatefulDataLoader itself to `trainer.fit(train_data, eval_data)`": "use_stateful_dataloader",
    '`data`, such as `data={"num_workers": 4}`': "dataloader_config",
    "`deterministic`": "full_determinism",
    "`seed`, which also determines the data order": "data_seed",
    "not needed: `seed` sets all random states, and checkpoints hold them": "rng_types",
    # Other
    "not built in: call `torch.cuda.empty_cache()` in a `Callback`": "torch_empty_cache_steps",
    "not built in: set `torch.backends.cudnn.benchmark` in the script": "benchmark",
    "not built in: call the model's generate method in the predict_fn of `trainer.predict(data, predict_fn)`": (
        "predict_with_generate generation_max_length generation_num_beams generation_config"
    ),
    "not needed: leave out callbacks and checkpoints": "barebones",
    "not supported: use the settings `precision` and `parallel` instead": "kwargs_handlers",
    "not supported, and there is no equivalent": (
        "jit_mode_eval use_ipex past_index mp_parameters ray_scope tpu_num_cores tpu_metrics_debug "
        "use_legacy_prediction_loop plugins model_registry truncated_bptt_steps multiple_trainloader_mode "
        "amp_backend amp_level move_metrics_to_cpu prepare_data_per_node"
    ),
}
"""Maps the end of a message to the names, separated by spaces, that it answers.

Code in a message is in backticks, and a test checks that this code exists. If a message begins with code, this code is
the nearest equivalent.
"""
EQUIVALENTS = {name: text for text, names in _NAMES_BY_EQUIVALENT.items() for name in names.split()}


def equivalent(name: str) -> str | None:
    """The replacement for a name of another framework, as text for a message; None for an unknown name."""
    text = EQUIVALENTS.get(name, "")
    return f"use {text.replace('`', '')}" if text.startswith("`") else text or None
