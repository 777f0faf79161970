"""Names that users bring from other frameworks: each is answered with what to write in ddpkit."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_kit
from ddp_kit import ConfigError, Trainer, TrainerConfig
from ddp_kit.cli.commands import COMMANDS
from ddp_kit.config import other_frameworks
from ddp_kit.config.other_frameworks import equivalent
from ddp_kit.config.settings import _setting_names
from ddp_kit.launcher.spec import parse

# Arguments of the frameworks, from their releases: Hugging Face, Lightning, Accelerate.
NAMES = {
    "transformers 5.24, TrainingArguments": """
        output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
        lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
        optim_target_modules gradient_accumulation_steps average_tokens_across_devices max_grad_norm
        label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 activation_checkpointing
        activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile
        torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha
        torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps logging_first_step
        log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica
        disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
        eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
        eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
        save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint
        push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
        load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
        restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config
        parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
        dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
        dataloader_in_order remove_unused_columns label_names train_sampling_strategy length_column_name
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
        fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint
        local_rank
    """,
    "transformers 5.24, Seq2SeqTrainingArguments": """
        sortish_sampler predict_with_generate generation_max_length generation_num_beams generation_config
    """,
    "transformers 5.24, Trainer": """
        model args data_collator train_dataset eval_dataset processing_class model_init compute_loss_func
        compute_metrics callbacks optimizers optimizer_cls_and_kwargs preprocess_logits_for_metrics
    """,
    "transformers 4, TrainingArguments and Trainer": """
        overwrite_output_dir evaluation_strategy per_gpu_train_batch_size per_gpu_eval_batch_size warmup_ratio
        logging_dir save_safetensors no_cuda use_mps_device jit_mode_eval use_ipex fp16_opt_level fp16_backend
        half_precision_backend tpu_num_cores tpu_metrics_debug past_index fsdp_min_num_params
        fsdp_transformer_layer_cls_to_wrap adafactor group_by_length include_inputs_for_metrics
        include_tokens_per_second torchdynamo ray_scope mp_parameters split_batches dispatch_batches
        push_to_hub_model_id push_to_hub_organization push_to_hub_token use_legacy_prediction_loop tokenizer
    """,
    "lightning 2.6, Trainer": """
        accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs min_epochs
        max_steps min_steps max_time limit_train_batches limit_val_batches limit_test_batches limit_predict_batches
        overfit_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps
        enable_checkpointing enable_progress_bar enable_model_summary accumulate_grad_batches gradient_clip_val
        gradient_clip_algorithm deterministic benchmark inference_mode use_distributed_sampler profiler
        detect_anomaly barebones plugins sync_batchnorm reload_dataloaders_every_n_epochs default_root_dir
        enable_autolog_hparams model_registry
    """,
    "lightning 2.6, Trainer.fit": """
        model train_dataloaders val_dataloaders datamodule ckpt_path weights_only
    """,
    "lightning 2.6, ModelCheckpoint and schedulers": """
        dirpath filename monitor save_last save_top_k save_weights_only mode every_n_train_steps train_time_interval
        every_n_epochs interval frequency
    """,
    "lightning 1, Trainer": """
        gpus num_processes tpu_cores ipus auto_select_gpus auto_scale_batch_size auto_lr_find track_grad_norm
        resume_from_checkpoint weights_save_path checkpoint_callback progress_bar_refresh_rate process_position
        weights_summary log_gpu_memory flush_logs_every_n_steps amp_backend amp_level terminate_on_nan
        replace_sampler_ddp truncated_bptt_steps multiple_trainloader_mode move_metrics_to_cpu
        reload_dataloaders_every_epoch stochastic_weight_avg prepare_data_per_node distributed_backend
    """,
    "accelerate 1.15, Accelerator": """
        device_placement split_batches mixed_precision gradient_accumulation_steps cpu dataloader_config
        deepspeed_plugin fsdp_plugin torch_tp_plugin megatron_lm_plugin rng_types log_with project_dir
        project_config gradient_accumulation_plugin step_scheduler_with_optimizer kwargs_handlers dynamo_backend
        dynamo_plugin deepspeed_plugins parallelism_config
    """,
    "accelerate 1.15, DataLoaderConfiguration and launch": """
        split_batches dispatch_batches even_batches use_seedable_sampler data_seed non_blocking
        use_stateful_dataloader num_processes num_machines
    """,
}

ALL = sorted({name for names in NAMES.values() for name in names.split()})
SAME = {"deterministic", "max_grad_norm", "max_steps", "precision", "seed", "warmup_steps"}
"""Names that ddpkit's settings have too, with the same meaning."""


def problems_of(make: Any, *values: Any, **named: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        make(*values, **named)
    return caught.value.problems


def idle_trainer(**named: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(nn.Linear(1, 1), lambda parameters: torch.optim.SGD(parameters), lambda model, batch: batch, **named)


def test_argument_of_another_framework_is_a_setting_or_has_an_answer() -> None:
    assert {name for name in ALL if name in TrainerConfig.model_fields} == SAME
    unknown = {name: 1 for name in ALL if name not in SAME}
    answers = {name: equivalent(name) for name in unknown}
    assert not [name for name, answer in answers.items() if answer is None]
    assert problems_of(TrainerConfig, **unknown) == tuple(
        f"{name} = 1: there is no such setting; {answer}" for name, answer in answers.items()
    )


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("per_device_train_batch_size", "use micro_batch_size (samples per rank and pass); global_batch_size"),
        ("lr_scheduler_type", "it is an argument of the Trainer: `Trainer(..., scheduler=...)`"),
        ("eval_strategy", "use eval_every_steps (optimizer steps) or eval_every_epochs"),
        ("eval_steps", "use eval_every_steps"),
        ("optim", "it belongs to the optimizer that you pass to the Trainer"),
        ("val_check_interval", "use eval_every_steps"),
        ("enable_checkpointing", 'use checkpoint={"dir": "run"}'),
        ("split_batches", "not needed: `global_batch_size` counts the samples of all ranks"),
        ("num_train_epochs", "use epochs"),
        ("logging_steps", "use log_every_steps"),
        ("accumulate_grad_batches", "use accumulation_steps"),
        (
            "num_processes",
            "the launcher starts the processes; pass their number per node: `ddpkit launch --nnodes 2",
        ),
    ],
)
def test_name_of_another_framework_is_refused_with_its_equivalent(name: str, answer: str) -> None:
    (problem,) = problems_of(TrainerConfig, **{name: 2})
    assert problem.startswith(f"{name} = 2: there is no such setting; {answer}")
    (problem,) = problems_of(TrainerConfig, checkpoint={name: 2})
    assert problem.startswith(f"checkpoint.{name} = 2: there is no such setting; {answer}")


def test_unknown_arguments_of_trainer_are_listed_with_equivalents() -> None:
    given = {"max_epochs": 3, "args": None, "epochs": 3, "metric": {}, "train_dataset": [1], "frob": 1}
    assert problems_of(idle_trainer, **given) == (
        "max_epochs = 3: there is no such argument; use epochs",
        "args = None: there is no such argument; pass settings as a TrainerConfig: "
        "`Trainer(..., config=TrainerConfig(epochs=3))`",
        "epochs = 3: there is no such argument; it is a setting: TrainerConfig(epochs=3)",
        "metric = {}: there is no such argument; did you mean metrics?",
        "train_dataset = [1]: there is no such argument; pass the data to `trainer.fit(train_data, eval_data)`",
        "frob = 1: there is no such argument; help(ddp_kit.TrainerConfig) lists the settings",
    )
    made = idle_trainer()
    for call in (made.fit, made.steps, made.evaluate, made.predict):
        (problem,) = problems_of(call, torch.ones(2, 1), ckpt_path="last")
        assert problem == "ckpt_path = 'last': there is no such argument; use checkpoint.resume"


# What the answers name ------------------------------------------------------------------------------------------------

CODE = sorted(
    {
        code
        for text in other_frameworks.EQUIVALENTS.values()
        for code in re.findall(r"`(.+?)`", text) or re.findall(r"Trainer\(.+\)", text)
    }
)


def attribute(path: str, of: object) -> object:
    for name in path.split("."):
        of = getattr(of, name)
    return of


def check_exists(code: str) -> None:
    """Raise an error unless the code names something that exists, and settings that are accepted."""
    if code.startswith("ddpkit "):
        _, command, *words = code.split()
        assert command in COMMANDS
        if command == "launch":
            parse(words, {})
        return
    if re.fullmatch(r"[a-z_]+=.+", code):  # a setting with a value
        TrainerConfig(**eval(f"dict({code})"))
        return
    tree = ast.parse(code, mode="eval").body
    called = tree.func if isinstance(tree, ast.Call) else tree
    name = ast.unparse(called)
    if name in (*_setting_names(TrainerConfig), *TrainerConfig.model_fields):
        assert called is tree
    elif name.startswith("trainer."):
        attribute(name.removeprefix("trainer."), idle_trainer())
    elif name.startswith("Callback."):
        attribute(name.removeprefix("Callback."), ddp_kit.Callback)
    elif name.startswith("torch."):
        attribute(name.removeprefix("torch."), torch)
    elif name == "Trainer" and isinstance(tree, ast.Call):
        unknown = [each.arg for each in tree.keywords if each.arg not in Trainer.__init__.__annotations__]
        assert not unknown
        for each in tree.keywords:
            if isinstance(each.value, ast.Call):
                check_exists(ast.unparse(each.value))
    elif name == "TrainerConfig":
        eval(code, {"TrainerConfig": TrainerConfig})
    else:
        assert name.partition(".")[0] in ddp_kit.__all__
        attribute(name, ddp_kit)


@pytest.mark.parametrize("code", CODE)
def test_code_in_an_answer_exists(code: str) -> None:
    check_exists(code)


@pytest.mark.parametrize(
    "code", ["eval_ever", "data.worker", 'precision="bf"', "trainer.fitt(data)", "Trainer(..., a=1)"]
)
def test_check_of_answers_finds_code_that_does_not_exist(code: str) -> None:
    with pytest.raises((AssertionError, AttributeError, ConfigError)):
        check_exists(code)


def test_other_frameworks_module_is_imported_only_for_an_unknown_name() -> None:
    for path in Path(ddp_kit.__file__).parent.rglob("*.py"):
        at_import = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [node for node in at_import if "other_frameworks" in ast.unparse(node)], path
