"""Which faults there are, and what shows that nothing is lost: a section of tests/faults/matrix.py, or tests; or why
nothing does."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """by: names of sections, or file::test, without its room and `test_`. lacks: what is not shown, and why."""

    id: str
    what: str
    by: tuple[str, ...] = ()
    lacks: str = ""


KILLS, SIGNALS = "kill -9 at any time", "SIGTERM or SIGUSR1 to one rank"
HANGS = "a rank stops (SIGSTOP), stands still, dies, or loses its connections"
WRONG = "the same step goes wrong, once or three times"
DAMAGE, PAIRS, FULL = "damaged checkpoint", "any of 12 layouts loads what any of 12 saved", "no room on the disk"
FAILS, DIES, POWER = (
    "every storage operation fails",
    "the process dies in every storage operation",
    "power is cut at every storage operation",
)

CASES = [
    Case(
        "F01-F03",
        "kill -9 of the first, the last, any rank at any time",
        (KILLS, "training::kill_9_of_a_rank_changes_nothing"),
    ),
    Case("F04", "kill -9 while ranks meet", (KILLS,)),
    Case("F05", "kill -9 at each point of a save", (DIES,)),
    Case(
        "F06",
        "what writes in the background dies",
        (
            "checkpoint_background::a_process_that_dies_in_mid_save_leaves_the_earlier_checkpoint",
            "checkpoint_background::a_failure_is_told_later_and_the_next_save_works",
        ),
    ),
    Case(
        "F07",
        "a data worker dies",
        ("data::prefetch_raises_in_the_consumer",),
        "loading is a thread, which cannot be killed alone",
    ),
    Case("F08", "kill -9 of the launcher", ("cli::ranks_do_not_outlive_their_launcher",)),
    Case(
        "F09, F12",
        "SIGTERM, SIGUSR1 or SIGINT once",
        (
            SIGNALS,
            "training::one_rank_or_a_limit_of_time_is_enough",
            "cli::a_signal_is_passed_on_and_the_ranks_are_waited_for",
        ),
    ),
    Case(
        "F10",
        "a second signal",
        (
            "cli::a_second_signal_ends_the_ranks_at_once",
            "cli::a_rank_saves_on_the_first_signal_and_ends_at_once_on_a_second",
        ),
    ),
    Case("F13", "all at once, as in a power cut", (POWER, KILLS)),
    Case(
        "F14",
        "the same crash at the same step again and again",
        (WRONG, "failures::what_stops_a_run_again_is_told_and_what_does_not"),
        "Phalanx starts nothing anew by itself: it says that starting again will not help; kills by the "
        "system are not counted",
    ),
    Case("F15", "two resumes in a row", ("resume::two_resumes_in_a_row_are_exact", SIGNALS)),
    Case(
        "F17",
        "out of memory",
        ("checkpoint_background::a_host_without_room_for_copies_waits_instead_and_says_so",),
        "host memory that runs out in a step is the kernel's kill -9; GPU memory is in the GPU tests",
    ),
    Case("F19", "a rank is stopped for good", (HANGS,)),
    Case("F20", "a rank is stopped for some seconds", ("a rank pauses for 3 s, or comes late by as much",)),
    Case(
        "F21",
        "a rank is slow",
        ("a rank is slow", "pace::who_works_longer_than_the_others_of_its_stage", "pace::waiting_is_no_work"),
    ),
    Case(
        "F22",
        "ranks call different collectives",
        ("a rank leaves out a collective", "calls::of_two_ranks_the_one_that_did_not_do_as_in_the_step_before"),
    ),
    Case("F23", "no network between two hosts", ("no packet comes between two hosts any more",)),
    Case("F25", "a slow network that loses packets", ("packets between two hosts come late and get lost",)),
    Case(
        "F26",
        "where ranks meet is wrong or taken",
        ("cli::impossible_worlds", "cli::two_ranks_meet", "a rank pauses for 3 s, or comes late by as much"),
    ),
    Case(
        "F27, F30",
        "no room, or a quota",
        (
            FULL,
            "checkpoint::a_disk_without_room_is_found_before_writing",
            "checkpoint::one_rank_with_a_full_disk_fails_on_all_ranks",
        ),
    ),
    Case(
        "F28", "an I/O error in each operation", (FAILS, "every request to object storage fails, once or from then on")
    ),
    Case(
        "F29",
        "the folder goes away or may not be written",
        ("the run's folder is moved, replaced or made read-only", "config::run_folder"),
    ),
    Case(
        "F31, F43",
        "a disk slower than the saves",
        ("checkpoint_background::the_run_does_not_wait_for_a_slow_disk_and_never_has_two_saves_under_way",),
    ),
    Case("F32", "files cut short", (DAMAGE, "checkpoint::damage_is_seen")),
    Case(
        "F33",
        "flipped bits",
        (
            "a bit flips in a file of a checkpoint",
            DAMAGE,
            "checkpoint_bytes::every_flipped_bit_is_found_by_name_at_load",
        ),
    ),
    Case(
        "F35",
        "manifests that are none",
        (
            "checkpoint::manifests_that_are_none",
            "checkpoint_bytes::the_manifest_is_sealed_byte_by_byte",
            "checkpoint::a_manifest_cannot_name_files_outside",
        ),
    ),
    Case("F36", "all checkpoints bad", ("checkpoint_bytes::a_run_whose_checkpoints_are_all_bad_does_not_start",)),
    Case(
        "F37",
        "a wrong pointer to the newest",
        ("checkpoint::the_newest_good_one_is_found_and_never_none_of_bad_ones",),
        "there is no pointer",
    ),
    Case("F38", "a mistyped path", ("config::a_mistyped_checkpoint_is_exit_4_and_never_random_weights",)),
    Case(
        "F40",
        "two runs in one folder",
        ("checkpoint::one_run_at_a_time_writes_to_a_folder", "loop::a_folder_has_one_run"),
    ),
    Case("F41", "a lock of a dead process", ("checkpoint::the_lock_of_a_dead_process_is_free",)),
    Case(
        "F42",
        "retention meets damage, or cannot delete",
        (
            "checkpoint::retention_keeps_the_newest_good_ones_and_protected_ones",
            "checkpoint::a_removal_that_fails_is_told_and_tried_again",
        ),
    ),
    Case(
        "F45",
        "another layout, another number of ranks",
        (PAIRS, "checkpoint::any_layout_loads_what_any_other_saved", "training::another_layout_continues_the_same_run"),
    ),
    Case("F46, F50", "what may change is told", ("resume::what_may_change_is_told",)),
    Case(
        "F47",
        "another model",
        ("resume::what_must_match_is_refused_old_to_new", "checkpoint::another_model_is_told_field_by_field"),
    ),
    Case(
        "F48, F67",
        "other data, or another file of the same size",
        ("resume::another_file_of_the_same_size_is_seen_and_a_moved_one_is_the_same",),
    ),
    Case("F49", "another tokenizer", ("resume::another_tokenizer_is_seen",)),
    Case(
        "F51",
        "another version of the format",
        ("checkpoint::manifests_that_are_none",),
        "one version has been released",
    ),
    Case("F52", "a run that is complete", (KILLS,)),
    Case("F54", "other versions of torch", ("resume::what_is_recorded_is_not_told_but_written_down",)),
    Case(
        "F55",
        "a gradient that is not a number",
        (
            "guard::a_bad_step_changes_nothing",
            "guard::stop_names_the_step",
            "precision::one_bad_value_skips_the_step_on_all_ranks",
        ),
    ),
    Case("F56", "infinite losses, numbers out of bounds", ("guard::scripted_sequences", "loop::nan_stops_the_run")),
    Case(
        "F58",
        "a bit flips in a rank's memory",
        ("guard::a_flipped_bit_names_the_rank", "guard::a_run_stops_at_the_next_look"),
    ),
    Case(
        "F59",
        "a wrong result that does not repeat",
        (WRONG, "guard::a_flipped_bit_names_the_rank"),
        "the step is done again by the next start, from the same bits, not in place",
    ),
    Case(
        "F60",
        "a loss scale at its minimum",
        ("precision::scale_never_goes_below_its_minimum", "loop::nan_stops_the_run"),
    ),
    Case(
        "F61",
        "damaged token files",
        (
            "data::every_truncation_is_refused",
            "data::foreign_and_damaged_index",
            "data::missing_files_name_what_is_near",
        ),
    ),
    Case("F63", "tokens outside the vocabulary", ("data::check_vocab_names_the_token",)),
    Case(
        "F64",
        "text that is none",
        ("prepare::bad_lines_are_named_or_counted", "prepare::compressed_files_that_end_too_early"),
    ),
    Case(
        "F65",
        "too little data, bad weights",
        ("data::too_short_or_mismatched", "data::bad_weights", "data::use_of_sources_and_max_epochs"),
    ),
    Case("S01", "pickles that run a command", ("checkpoint_tools::nothing_in_a_foreign_folder_is_run",)),
    Case(
        "S03",
        "folders that name files or code elsewhere",
        (
            "checkpoint::an_index_cannot_leave_its_folder",
            "checkpoint::an_unknown_architecture_is_told_the_nearest_and_how_to_add_one",
        ),
    ),
    Case(
        "S04, S08",
        "archives, control ports",
        lacks="Phalanx opens no archives and no port but the one where ranks meet",
    ),
    Case("S07", "folders that anybody may write to", ("resume::a_folder_that_anybody_may_write_to_is_told",)),
    Case("S09", "secrets in logs", ("training::secrets_of_the_environment_are_nowhere",)),
]


def table() -> str:
    rows = [f"| {c.id} | {c.what} | {'; '.join(shown(by) for by in c.by)} | {c.lacks} |" for c in CASES]
    return "\n".join(["| id | fault | shown by | not shown |", "| --- | --- | --- | --- |", *rows])


def shown(by: str) -> str:
    """A section by its name, a test by its file and name."""
    file, _, name = by.partition("::")
    return f"`test_{file}.py` {name.replace('_', ' ')}" if name else f"**{by}**"
