//! The list of checks. What each looks for is said where it is written.

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
    teeth_unpublished_tail
    teeth_unacquired_loads
    teeth_unpublished_runnext
    teeth_unreleased_pop
}

checks! { join:
    complete_against_wait
    complete_against_detach
    complete_against_is_done
    teeth_unpublished_result
    teeth_unacquired_result
}

checks! { park:
    park_against_wake
    park_twice
    resumed_elsewhere
    teeth_unpublished_registers
    teeth_unacquired_notice
    teeth_commit_before_save
}

checks! { depot:
    two_caches_trade_batches
    single_stacks_and_batches
    reserved_stack_is_always_found
    teeth_used_after_given
}

checks! { bed:
    park_against_unpark
    note_at_the_last_moment
    two_wakers
    teeth_unpublished_note
    teeth_unacquired_note
    teeth_note_overwritten
}

checks! { wake:
    one_submitter_one_worker
    one_submitter_two_workers
    two_submitters_one_worker
    goroutine_submits_to_its_own_queue
    displaced_runnext_is_found
    the_one_who_finds_looks_for_more
    teeth_no_barrier
    teeth_no_barrier_after_a_find
    teeth_finds_and_is_gone
    teeth_displaced_after_the_barrier
    teeth_no_second_look
    teeth_second_look_too_early
}

checks! { keeper:
    timer_against_sleep
    earlier_timer_against_the_keeper
    timer_then_work
    work_then_earlier_timer
    unannounced_timer_then_work
    teeth_any_keeper_will_do
    teeth_unkept_timers
    teeth_hurries_nobody
    teeth_no_barrier
}

/// Tables for those who change an ordering: `cargo test -p trefoil-model -- --ignored --nocapture`.
mod sweeps {
    #[test]
    #[ignore = "prints which orderings the checks need; minutes"]
    fn orderings() {
        trefoil_model::join::sweep_orderings();
        trefoil_model::park::sweep_orderings();
        trefoil_model::bed::sweep_orderings();
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
    spinner_announces
    teeth_unreleased_unlock
    teeth_unacquired_lock
    teeth_not_handed_over
    teeth_desertion_unsaid
}

checks! { rwlock:
    reader_against_writer
    two_readers_against_a_writer
    reader_against_two_writers
    writer_that_stays
    impatient_ones
    writer_gives_up_before_a_reader
    teeth_unreleased
    teeth_unacquired
    teeth_unacquired_look
    teeth_silent_reader
    teeth_locked_out
}

checks! { once:
    two_callers
    three_callers
    gives_up_and_the_other_runs
    teeth_unpublished_effect
    teeth_unacquired_done
}

checks! { channel:
    send_against_recv
    two_senders
    order_of_a_sender
    close_against_send_and_recv
    deadline_against_send
    stale_deadline
    try_recv_against_close
    last_ends_are_dropped
    teeth_no_lock
    teeth_claimed_twice
    teeth_stale_deadline
    teeth_unordered_free
}

checks! { select:
    against_two_senders
    against_select
    against_two_selects
    never_meets_itself
    against_close
    against_deadline
    default_is_true_of_one_moment
    teeth_default_by_one
    teeth_claimed_twice
    teeth_own_wait_not_claimed
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
    teeth_drained_before_stopped
    teeth_fires_at_any_time
    teeth_swept_secretly
}
