"""Launches that `make test` runs: for each promise, command, strategy and engine the one that would notice a break.

A test marked `slow` starts the real command, or takes long. `make test` runs those listed here; `make thorough` runs
them all. Whoever adds a launch here says in the commit which one it replaces: the gate stays under ten minutes. Ray and
SkyPilot take longer to start than a launch may take: their tests are in `make thorough`, and quick tests compare their
job files.

An entry is `file::test`, with `[words]` where only the cases whose id contains these words are meant.
"""

LAUNCHES = {
    "every torchrun command line works": (
        "launcher/test_contract_flags.py::test_defaults_that_torchrun_takes_from_the_environment_are_all_tested",
        "launcher/test_contract_flags.py::test_log_folders_and_files_are_private_and_never_left_empty",
        "launcher/test_contract_flags.py::test_no_python_program_gets_its_rank_and_its_arguments",
        "launcher/test_contract_flags.py::test_plugins_for_rendezvous_and_event_logs_are_used_by_torchrun_itself",
        "launcher/test_contract_flags.py::test_two_agents_form_one_job[c10d]",
        "launcher/test_contract_flags.py::test_failed_group_is_restarted_until_it_succeeds",
        "launcher/test_contract_flags.py::test_signal_to_the_launcher_reaches_every_worker[named]",
        "launcher/test_contract_flags.py::test_worker_that_ignores_sigterm_is_killed_after_the_shutdown_timeout",
        "launcher/test_contract_flags.py::test_invalid_flag_is_one_message_without_a_traceback[--nnodes 3:1]",
        "launcher/test_contract_flags.py::test_port_in_use_names_the_process_that_uses_it[c10d]",
        "cli/test_cli.py::test_modules_programs_and_macros_start_like_under_torchrun",
        "end_to_end/test_launchers.py::test_workers_have_the_same_environment_as_under_torchrun",
    ),
    "a warm start is as a cold one": (
        "end_to_end/test_same_script.py::test_kept_warm_and_cold_workers_and_plain_python_look_alike_to_a_script[itself]",
        "end_to_end/test_import_traces.py::test_what_imports_leave_is_in_each_worker_as_in_a_new_process[warm]",
        "launcher/test_warm.py::test_workers_die_with_the_server_and_the_launcher_notices",
        "cli/test_cli.py::test_import_of_the_command_line_imports_neither_torch_nor_nvml",
        "house/test_imports.py::test_trainer_imports_no_part_of_torch_that_the_warm_server_has_not",
        "house/test_public_names.py::test_torch_is_imported_only_by_names_that_need_it[import ddp_kit-]",
    ),
    "restarts work": (
        "end_to_end/test_restarts.py::test_restart_after_every_kill_starts_all_ranks[flags1-4]",
        "end_to_end/test_restarts.py::test_crash_loop_ends_after_max_restarts_without_a_new_step",
        "end_to_end/test_faults.py::test_launcher_whose_ranks_have_saved_exits_with_the_code_for_a_restart",
        "rigs/test_hosts.py::test_survivors_of_a_dead_host_continue_and_admit_its_replacement[power cut]",
    ),
    "nothing is left": (
        "end_to_end/test_faults.py::test_fault_leaves_no_process_or_file[the_launcher_is_killed-warm]",
        "end_to_end/test_faults.py::test_fault_leaves_no_process_or_file[the_server_is_killed-warm]",
        "end_to_end/test_faults.py::test_fault_leaves_no_batches_in_named_shared_memory[the_launcher_is_killed]",
        "end_to_end/test_faults.py::test_process_that_a_script_leaves_running_is_ended_and_named",
        "cli/test_cli.py::test_launch_leaves_no_temporary_files",
        "cli/test_cli.py::test_interrupted_launcher_ends_its_workers_and_reports_it",
        "trainer/test_loop.py::test_finished_trainer_holds_no_process_thread_or_descriptor",
    ),
    "one root cause": (
        "end_to_end/test_faults.py::test_traceback_of_one_of_eight_ranks_is_shown_once_and_last",
        "end_to_end/test_faults.py::test_verdict_is_written_as_json_to_the_log_folder",
        "end_to_end/test_faults.py::test_dataloader_worker_that_dies_or_hangs_is_named_with_its_rank[dies]",
        "end_to_end/test_faults.py::test_every_node_ends_with_the_same_verdict[7]",
        "end_to_end/test_hangs.py::test_hung_rank_in_a_trainer_is_named_with_its_stack[stop]",
        "end_to_end/test_mistakes.py::test_configuration_with_five_mistakes_lists_them_once[ddpkit-3]",
        "end_to_end/test_mistakes.py::test_ranks_that_diverge_are_reported[other-]",
        "cli/test_cli.py::test_exit_code_is_that_of_the_first_failing_worker[sys.exit(7)]",
    ),
    "exact at any scale and placement": (
        "end_to_end/test_exact.py::test_training_at_any_number_of_ranks_equals_that_of_the_whole_global_batch[few]",
        "end_to_end/test_placements.py::test_placements_of_the_quick_table_train_like_one_process",
        "end_to_end/test_pipelined.py::test_pipeline_loss_that_uses_weights_of_other_stages_is_an_error",
        "end_to_end/test_third_strategy.py::test_third_strategy_is_used",
        "end_to_end/test_evaluation.py::test_evaluation_and_predictions_do_not_depend_on_the_ranks[3]",
        "end_to_end/test_streams.py::test_streams_of_unequal_lengths_train_exactly[3]",
        "end_to_end/test_memory.py::test_out_of_memory_with_one_sample_says_that_nothing_smaller_exists",
    ),
    "bitwise resume": (
        "end_to_end/test_resume.py::test_killed_run_ends_like_an_undisturbed_one[2-2-11-8]",
        "end_to_end/test_resume.py::test_resume_under_every_strategy_is_bitwise['pipeline_stages': ['3'], 'shard']",
        "end_to_end/test_copies.py::test_failure_costs_what_was_trained_since_the_last_copy[SIGKILL-ddp-callback]",
        "rigs/test_object_storage.py::test_run_that_is_killed_after_a_save_resumes_from_the_store",
        "end_to_end/test_preemption.py::test_stop_signals_at_different_times_save_the_same_step_on_all_ranks",
        "checkpoint/test_saver.py::test_writer_process_ignores_signals_to_the_whole_job",
        "checkpoint/test_writing.py::test_write_killed_at_any_operation_leaves_the_old_or_the_new_checkpoint",
    ),
    "no overhead": (
        "end_to_end/test_logging_in_each_step.py::test_logged_value_adds_no_collective_to_a_step",
        "parallel/test_fsdp.py::test_fsdp_step_sends_only_the_necessary_collectives[whole-reduced0]",
        "trainer/test_timing.py::test_step_clock_of_a_rank_that_waits_for_another_counts_communication",
    ),
    "predictable": (
        "cli/test_dry_run.py::test_dry_run_shows_the_environment_that_workers_get[words0]",
        "cli/test_dry_run.py::test_launcher_prints_no_secrets[--dry-run fails.py]",
        "end_to_end/test_planned.py::test_plan_of_exact_bytes_equals_the_bytes_on_ranks[3-ddp]",
        "end_to_end/test_planned.py::test_auto_strategy_trains_with_its_choice",
    ),
    "each command": (
        "cli/test_checkpoint_command.py::test_checkpoints_command_lists_newest_first",
        "cli/test_export_command.py::test_export_command_needs_no_torch",
        "devices/test_devices.py::test_devices_shows_memory_load_numa_node_and_processes",
        "doctor/test_doctor.py::test_doctor_on_a_machine_that_can_train_exits_with_0",
        "doctor/test_env_command.py::test_env_command_prints_versions_machine_and_variables_without_secrets",
        "watching/test_top.py::test_top_reads_a_running_job_and_names_a_slow_rank",
        "cli/test_completion.py::test_bash_completion_offers_commands_flags_values_and_files",
        "report/test_report_page.py::test_report_page_fits_every_width_and_is_accessible[light-768]",
        "devices/test_reservations.py::test_launch_command_holds_its_gpus_while_its_job_runs",
        "launcher/test_waiting.py::test_command_that_a_waiting_node_prints_starts_the_missing_node",
        "end_to_end/test_run_record.py::test_run_record_of_a_job_that_restarts_is_one_record",
        "end_to_end/test_function_launch.py::test_launch_in_a_script_returns_results_and_raises_exceptions",
        "end_to_end/test_output.py::test_output_on_a_terminal_is_one_bar",
    ),
    "each engine": (
        "rigs/test_slurm.py::test_slurm_job_runs_on_both_nodes_and_passes_arguments_to_the_script",
        "rigs/test_kubernetes.py::test_exit_codes_decide_whether_the_job_restarts[kubernetes]",
        "rigs/test_ssh.py::test_ssh_hosts_that_do_not_answer_or_lack_ddpkit_are_named",
        "rigs/test_full_disk.py::test_training_continues_on_a_full_disk_but_the_last_save_must_succeed[full]",
        "rigs/test_shared_memory.py::test_batches_that_exceed_shared_memory_are_sent_otherwise_with_a_warning[ours]",
    ),
    "documents": (
        "house/test_docs.py::test_documented_commands_run[README.md]",
        "house/test_tutorial.py::test_tutorial_run_that_is_killed_ends_like_an_undisturbed_one",
        "end_to_end/test_recipes.py::test_recipe_does_not_depend_on_the_ranks_and_resumes_bitwise[a pair]",
        "end_to_end/test_examples.py::test_example_runs_in_one_and_in_three_processes[3-plain_ddp]",
    ),
}


def entries() -> list[str]:
    """All entries of LAUNCHES."""
    return [entry for entries in LAUNCHES.values() for entry in entries]


_BY_TEST: dict[str, list[tuple[str, str]]] = {}  # file::test -> [(words of the id, entry)]
for _entry in entries():
    _test, _, _words = _entry.partition("[")
    _BY_TEST.setdefault(_test, []).append((_words.removesuffix("]"), _entry))


def chosen(node_id: str) -> list[str]:
    """Entries that mean the test with this id, such as `tests/cli/test_cli.py::test_x[case]`."""
    name, _, case = node_id.removeprefix("tests/").partition("[")
    return [entry for words, entry in _BY_TEST.get(name, []) if words in case]
