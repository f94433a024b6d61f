//! The list of checks. Each is described where it is defined.

/// A test for each check of a module.
macro_rules! checks {
    ($module:ident: $($check:ident)*) => {
        mod $module {
            $(
                #[test]
                fn $check() {
                    trefoil_model::$module::$check();
                }
            )*
        }
    };
}

checks! { runq:
    owner_against_one_thief
    owner_against_two_thieves
    runnext_pushed_displaced_and_stolen
    runnext_against_two_thieves
    overflow_against_thieves
    wrap_around_under_a_thief
    stolen_from_a_thief
    never_falsely_empty_when_runnext_is_kicked
    never_falsely_empty_when_the_ring_is_popped
    detects_unpublished_tail
    detects_unacquired_loads
    detects_unpublished_runnext
    detects_unreleased_pop
}

checks! { join:
    complete_against_wait
    complete_against_detach
    complete_against_is_done
    complete_against_polls_and_drop
    complete_against_poll_and_join
    detects_unpublished_result
    detects_unacquired_result
}

checks! { park:
    park_against_wake
    park_twice
    resumed_elsewhere
    detects_unpublished_registers
    detects_unacquired_notice
    detects_commit_before_save
}

checks! { task:
    two_wakes_against_polls
    polls_on_two_carriers
    cancel_against_wake
    stale_waker_against_reuse
    detects_unpublished_wake
    detects_unacquired_poll
    detects_wake_without_a_write
}

checks! { stack_pool:
    two_caches_trade_batches
    single_stacks_and_batches
    reserved_stack_is_always_found
    detects_use_after_give
}

checks! { parker:
    park_against_unpark
    token_at_the_deadline_is_kept
    both_wakers_are_seen
    detects_unpublished_token
    detects_unacquired_token
    detects_overwritten_token
}

checks! { wake:
    one_submitter_one_worker
    one_submitter_two_workers
    two_submitters_one_worker
    goroutine_submits_to_its_own_queue
    displaced_runnext_is_found
    finder_checks_for_more_work
    detects_missing_barrier
    detects_missing_barrier_after_find
    detects_missing_recheck_after_find
    detects_displaced_runnext_after_barrier
    detects_missing_recheck
    detects_recheck_before_idle
    hand_off_against_submit
    detects_missing_recheck_after_hand_off
}

checks! { idle_poller:
    timer_against_sleep
    earlier_timer_against_idle_poller
    timer_then_work
    work_then_earlier_timer
    unannounced_timer_then_work
    timer_against_vacancy
    own_timer_in_vacancy
    timer_after_earlier_one
    detects_idle_poller_that_sleeps_longer
    detects_vacancy_that_does_not_end
    detects_idle_poller_with_later_deadline
    detects_unwatched_timer
    detects_idle_poller_not_woken
    detects_missing_barrier
}

/// Tables for a change of an ordering: `cargo test -p trefoil-model -- --ignored --nocapture`.
mod sweeps {
    #[test]
    #[ignore = "prints which orderings the checks need; minutes"]
    fn print_which_orderings_are_needed() {
        trefoil_model::join::sweep_orderings();
        trefoil_model::park::sweep_orderings();
        trefoil_model::parker::sweep_orderings();
        trefoil_model::wake::sweep_orderings();
        trefoil_model::rwlock::sweep_orderings();
        trefoil_model::runq::sweep_orderings();
    }
}

checks! { mutex:
    two_lock_and_unlock
    two_lock_twice
    three_lock
    starving_two_lock_twice
    starving_three
    withdrawn_against_unlock
    withdrawn_against_handover
    fair_unlock_against_two
    starving_fair_unlock_against_two
    withdrawn_against_fair_unlock
    detects_fair_handover_not_reported
    spinner_announces
    detects_unreleased_unlock
    detects_unacquired_lock
    detects_handover_not_reported
    detects_empty_queue_not_reported
}

checks! { rwlock:
    reader_against_writer
    two_readers_against_a_writer
    reader_against_two_writers
    writer_downgrades_to_reader
    deadlines_on_both_sides
    writer_gives_up_before_a_reader
    detects_unreleased_change
    detects_unacquired_change
    detects_unacquired_load
    detects_last_reader_not_waking
    detects_writer_leaving_lock_closed
}

checks! { once:
    two_callers
    three_callers
    failed_initialiser_is_run_by_a_waiter
    poisoned_once_is_run_by_a_waiter
    wait_ignores_a_panic
    wait_ends_with_a_panic
    detects_unpublished_effect
    detects_unacquired_done
}

checks! { channel:
    send_against_recv
    two_senders
    values_of_one_sender_stay_in_order
    close_against_send_and_recv
    deadline_against_send
    stale_deadline_ends_no_later_wait
    try_recv_against_close
    last_handles_are_dropped_at_once
    detects_missing_lock
    detects_double_claim
    detects_stale_deadline
    detects_unordered_free
    task_receive_against_send
    dropped_receive_against_try_send
    dropped_receive_passes_its_value_on
    close_against_waiting_task
    detects_unpublished_state
    detects_unacquired_state
}

checks! { select:
    against_two_senders
    against_select
    against_two_selects
    select_never_matches_itself
    against_close
    against_deadline
    default_holds_at_one_moment
    detects_default_arm_by_arm
    detects_double_claim
    detects_own_wait_not_claimed
    future_against_send
    spurious_wakeups_against_send
    future_alone
    detects_lost_wakeup_during_poll
    detects_waker_not_waited_for
    watchers_against_send
    watchers_against_close
    watcher_against_waiting_sender
    watcher_of_send_against_receive
    watcher_that_times_out_takes_no_wakeup_along
}

checks! { timer:
    stop_against_fire
    reset_later_against_fire
    reset_earlier_against_fire
    sweep_against_reset_later
    stop_against_recv
    two_stops
    ticker_stop_against_fire
    function_against_stop
    function_against_reset
    function_against_drop
    tick_against_drop
    detects_drain_before_stop
    detects_firing_without_time_check
    detects_unreported_sweep
}
