"""Launches that `make test` runs: for each promise, command, strategy and engine the one that would notice a break.

A test marked `slow` starts the real command, or takes long. `make test` runs those listed here; `make thorough` runs
them all. Whoever adds a launch here says in the commit which one it replaces: the gate stays under ten minutes. Ray and
SkyPilot take longer to start than a launch may take: their tests are in `make thorough`, and quick tests compare their
job files.

An entry is `file::test`, with `[words]` where only the cases whose id contains these words are meant.
"""

LAUNCHES = {
    "every torchrun command line works": (
        "launcher/test_contract_flags.py::test_every_default_that_torchrun_takes_from_the_environment_is_tried_here",
        "launcher/test_contract_flags.py::test_folders_and_files_of_logs_are_private_and_none_is_empty_for_nothing",
        "launcher/test_contract_flags.py::test_a_program_that_is_not_python_gets_its_rank_and_its_arguments",
        "launcher/test_contract_flags.py::test_logs_specs_a_rendezvous_and_an_event_log_handler_come_from_plugins",
        "launcher/test_contract_flags.py::test_two_agents_are_one_job[c10d]",
        "launcher/test_contract_flags.py::test_a_failed_group_is_started_again_until_it_ends_well",
        "launcher/test_contract_flags.py::test_a_signal_to_the_launcher_reaches_every_worker[named]",
        "launcher/test_contract_flags.py::test_a_worker_that_will_not_end_is_killed_after_the_shutdown_timeout",
        "launcher/test_contract_flags.py::test_a_mistake_is_one_message_without_a_traceback[--nnodes 3:1]",
        "launcher/test_contract_flags.py::test_who_holds_the_port_is_named[c10d]",
        "launcher/test_cli.py::test_modules_programs_and_macros_start_as_with_torchrun",
        "end_to_end/test_launchers.py::test_workers_find_the_same_environment_as_under_torchrun",
    ),
    "a warm start is as a cold one": (
        "end_to_end/test_same_script.py::test_a_warm_worker_is_as_a_cold_one_and_both_as_plain_python[itself]",
        "launcher/test_warm.py::test_a_worker_is_forked_runs_and_its_end_is_told",
        "launcher/test_warm.py::test_workers_die_with_the_server_and_the_launcher_knows",
        "launcher/test_cli.py::test_importing_the_command_line_imports_neither_torch_nor_nvml",
        "house/test_imports.py::test_the_trainer_imports_nothing_of_torch_that_the_warm_server_has_not",
        "house/test_public_names.py::test_torch_is_imported_only_by_what_needs_it[import ddp_kit-]",
    ),
    "restarts work": (
        "end_to_end/test_restarts.py::test_every_restart_after_a_kill_comes_up[flags1-4]",
        "end_to_end/test_restarts.py::test_a_crash_loop_ends_after_so_many_restarts_without_a_new_step",
        "end_to_end/test_faults.py::test_ranks_that_have_saved_ask_for_another_run",
        "rigs/test_hosts.py::test_survivors_go_on_without_a_dead_host_and_its_replacement_is_let_in[power cut]",
    ),
    "nothing is left": (
        "end_to_end/test_faults.py::test_nothing_is_left[the_launcher_is_killed-warm]",
        "end_to_end/test_faults.py::test_nothing_is_left[the_server_is_killed-warm]",
        "end_to_end/test_faults.py::test_batches_shared_by_name_are_not_left[the_launcher_is_killed]",
        "end_to_end/test_faults.py::test_what_a_script_leaves_running_is_ended_with_the_job_and_named",
        "launcher/test_cli.py::test_nothing_is_left_in_the_folder_for_temporary_files",
        "launcher/test_cli.py::test_an_interrupted_launcher_ends_its_workers_and_says_so",
        "trainer/test_loop.py::test_a_trainer_that_has_finished_holds_no_process_thread_or_descriptor",
    ),
    "one root cause": (
        "end_to_end/test_faults.py::test_one_traceback_of_eight_ranks_is_shown_once_and_last",
        "end_to_end/test_faults.py::test_the_verdict_is_kept_for_programs",
        "end_to_end/test_faults.py::test_a_data_loader_worker_that_dies_or_hangs_is_named_with_its_rank[os.kill]",
        "end_to_end/test_faults.py::test_every_node_ends_with_the_same_verdict[sys.exit]",
        "end_to_end/test_hangs.py::test_a_rank_that_hangs_in_a_trainer_is_named_with_its_stack[stop]",
        "end_to_end/test_mistakes.py::test_five_mistakes_in_a_configuration_are_listed_once[ddpkit-3]",
        "end_to_end/test_mistakes.py::test_ranks_that_go_apart_are_told_so[other-]",
        "launcher/test_cli.py::test_the_exit_code_is_the_first_failing_worker_s[sys.exit(7)]",
    ),
    "exact at any scale and placement": (
        "end_to_end/test_exact.py::test_training_is_that_of_the_whole_global_batch_at_every_number_of_ranks[few]",
        "end_to_end/test_placements.py::test_rows_of_the_table_are_those_of_one_process",
        "end_to_end/test_pipelined.py::test_a_loss_that_uses_weights_of_other_stages_is_an_error",
        "end_to_end/test_third_strategy.py::test_it_is_this_strategy",
        "end_to_end/test_evaluation.py::test_values_and_predictions_do_not_depend_on_the_ranks[3]",
        "end_to_end/test_streams.py::test_streams_of_unequal_lengths_are_trained_on_exactly[3]",
        "end_to_end/test_memory.py::test_what_does_not_even_fit_with_one_sample_says_so",
    ),
    "bitwise resume": (
        "end_to_end/test_resume.py::test_a_killed_run_ends_as_an_undisturbed_one[2-2-11-8]",
        "end_to_end/test_resume.py::test_so_it_does_under_every_strategy['pipeline_stages': ['3'], 'shard']",
        "end_to_end/test_resume.py::test_save_of_a_killed_rank_is_completed_before_the_launcher_exits",
        "end_to_end/test_preemption.py::test_ranks_that_hear_a_signal_at_different_times_save_after_the_same_step",
        "checkpoint/test_saver.py::test_writer_process_ignores_signals_to_the_whole_job",
        "checkpoint/test_writing.py::test_write_killed_at_any_operation_leaves_the_old_or_the_new_checkpoint",
    ),
    "no overhead": (
        "end_to_end/test_logging_in_each_step.py::test_a_logged_value_adds_no_collective_to_a_step",
        "parallel/test_fsdp.py::test_a_step_sends_what_fsdp_needs_and_nothing_else[whole-reduced0]",
        "test_timing.py::test_a_rank_that_waits_for_another_s_gradients_communicates",
    ),
    "predictable": (
        "launcher/test_dry_run.py::test_a_worker_finds_the_environment_that_was_told[words0]",
        "launcher/test_dry_run.py::test_nothing_the_launcher_prints_has_a_secret[--dry-run fails.py]",
        "end_to_end/test_planned.py::test_what_is_called_exact_is_what_the_ranks_have[3-ddp]",
        "end_to_end/test_planned.py::test_ranks_train_with_what_auto_has_chosen",
    ),
    "each command": (
        "launcher/test_checkpoint_command.py::test_they_are_listed_newest_first",
        "launcher/test_export_command.py::test_the_command_does_it_without_torch",
        "launcher/test_devices.py::test_memory_load_node_and_who_computes_are_shown",
        "launcher/test_doctor.py::test_a_machine_that_can_train_is_exit_code_0_and_the_last_line_counts",
        "launcher/test_env_command.py::test_it_prints_versions_machine_and_variables_without_secrets",
        "launcher/test_top.py::test_a_running_job_is_read_from_outside_and_a_slow_rank_is_named",
        "launcher/test_completion.py::test_bash_completes_commands_flags_values_and_files",
        "launcher/test_report_page.py::test_it_fits_every_width_and_is_accessible[light-768]",
        "launcher/test_reservations.py::test_the_real_command_holds_its_gpus_while_its_job_runs",
        "launcher/test_waiting.py::test_the_command_that_a_waiting_node_prints_starts_the_missing_one",
        "end_to_end/test_run_record.py::test_a_job_that_restarts_leaves_one_record",
        "end_to_end/test_function_launch.py::test_a_script_gets_results_and_exceptions_back",
        "end_to_end/test_output.py::test_on_a_terminal_there_is_one_bar",
    ),
    "each engine": (
        "rigs/test_slurm.py::test_both_nodes_take_part_and_the_script_gets_its_arguments",
        "rigs/test_kubernetes.py::test_exit_codes_decide_what_starts_again[kubernetes]",
        "rigs/test_ssh.py::test_hosts_that_do_not_answer_or_lack_ddpkit_are_named",
        "rigs/test_full_disk.py::test_training_goes_on_over_a_full_disk_and_the_end_has_to_be_saved[full]",
        "rigs/test_shared_memory.py::test_batches_that_do_not_fit_go_another_way_and_it_is_said_before_training[ours]",
    ),
    "documents": (
        "house/test_docs.py::test_the_commands_of_a_document_run[README.md]",
        "house/test_tutorial.py::test_a_run_that_was_killed_ends_as_one_that_was_not",
        "end_to_end/test_recipes.py::test_a_recipe_does_not_depend_on_the_ranks_and_resumes_bitwise[a pair]",
        "end_to_end/test_examples.py::test_an_example_runs_in_one_and_in_three_processes[3-plain_ddp]",
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
    """Entries that mean the test with this id, such as `tests/launcher/test_cli.py::test_x[case]`."""
    name, _, case = node_id.removeprefix("tests/").partition("[")
    return [entry for words, entry in _BY_TEST.get(name, []) if words in case]
