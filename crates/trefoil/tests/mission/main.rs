//! What the scheduler promises, statement by statement, and the tests that show each statement to
//! hold: [`STATEMENTS`].
//!
//! The tests of this binary observe the scheduler from outside. The documentation of a test begins
//! with its statement and says what makes the test fail. A test that measures the whole process, or
//! needs every P to itself, runs in a child process (`child_test!`). Traced tests read the
//! scheduler's own trace between two marks, while goroutines keep their Ps.

#[path = "../common/mod.rs"]
mod common;
mod goroutines;
mod queues;
mod threads;

use std::path::Path;

/// The statements, numbered from 1, each with the tests that show it to hold:
/// `binary::module::test` in this folder, or a whole file of tests, from the folder of all crates.
const STATEMENTS: [(&str, &[&str]); 29] = [
    // Goroutines.
    (
        "1. A goroutine is started by one short expression and costs far less than a thread: \
         thousands to millions live at once.",
        &["mission::goroutines::goroutines_cost_far_less_than_threads", "trefoil/tests/soak.rs"],
    ),
    (
        "2. A new goroutine goes to the current P's local queue; if that is full, half of it \
         moves to the global queue.",
        &[
            "mission::queues::newest_goroutine_runs_first_then_the_others_in_order",
            "mission::queues::full_local_queue_moves_half_to_the_global_queue",
        ],
    ),
    (
        "3. A goroutine is created, runnable, running, waiting (for I/O, time, a channel, a lock), \
         runnable again and dead; its memory is reused.",
        &[
            "mission::goroutines::goroutine_passes_through_every_state_and_its_memory_is_reused",
            "trefoil/tests/debug/dump.rs",
        ],
    ),
    (
        "4. A goroutine gets its stack and thread-locals before it runs.",
        &[
            "mission::goroutines::goroutine_starts_with_its_own_stack_and_fresh_thread_locals",
            "mission::goroutines::goroutine_has_no_stack_before_it_runs",
        ],
    ),
    (
        "5. When main returns, the program ends, whatever goroutines are left; main can wait for \
         them with join or a WaitGroup.",
        &[
            "mission::goroutines::run_returns_while_goroutines_still_run",
            "mission::goroutines::join_waits_for_each_of_a_hundred_goroutines",
            "trefoil/tests/sync/waitgroup.rs",
        ],
    ),
    (
        "6. The output of several goroutines interleaves on several Ps.",
        &["mission::goroutines::outputs_of_two_goroutines_interleave"],
    ),
    // Goroutines, threads and Ps.
    (
        "7. Many goroutines run on few OS threads, and are switched in user space.",
        &[
            "mission::threads::ten_thousand_goroutines_run_on_few_threads",
            "mission::threads::switches_between_goroutines_stay_in_user_space",
        ],
    ),
    (
        "8. At most GOMAXPROCS goroutines run at once. The default is the number of logical \
         processors; both numbers can be read, and the limit can be changed at run time.",
        &[
            "mission::threads::at_most_procs_goroutines_run_at_once",
            "mission::threads::procs_default_to_the_cpus_or_the_environment",
            "mission::threads::default_procs_follow_the_cpu_affinity",
        ],
    ),
    (
        "9. An M has one P at a time and needs one to run a goroutine; the M that has a P serves \
         its queue.",
        &["mission::threads::every_busy_p_has_an_m_of_its_own"],
    ),
    (
        "10. A goroutine stays with its P and M where it can.",
        &[
            "mission::threads::lone_goroutine_stays_on_its_thread",
            "mission::threads::pair_shares_one_thread_on_one_p",
            "mission::threads::pair_shares_one_thread_on_four_ps",
        ],
    ),
    // Queues and the scheduling order.
    (
        "11. Each P has a local run queue; one global run queue is open to all threads.",
        &["mission::queues::goroutines_queue_locally_and_threads_queue_globally"],
    ),
    (
        "12. The order is: the global queue every 61st time, the local queue, the global queue, \
         the network, other Ps' queues.",
        &[
            "mission::queues::every_61st_goroutine_comes_from_the_global_queue",
            "mission::queues::local_goroutines_do_not_starve_the_global_queue",
            "mission::queues::ready_sockets_come_after_local_and_before_stolen_work",
        ],
    ),
    (
        "13. A P takes a fair share of the global queue: with 6 goroutines and 3 Ps, 2 each.",
        &["mission::queues::a_p_takes_its_share_of_the_global_queue"],
    ),
    (
        "14. Stealing takes half of the queue of a random P.",
        &[
            "mission::queues::idle_ps_steal_from_a_busy_p",
            "mission::queues::stealing_takes_half_of_the_victims_queue",
            "mission::queues::thieves_choose_victims_at_random",
        ],
    ),
    (
        "15. An unblocked goroutine returns to a local queue or to the global queue.",
        &[
            "mission::queues::unblocked_goroutine_runs_next_on_the_waking_p",
            "mission::queues::goroutine_woken_by_another_runtime_joins_the_global_queue",
        ],
    ),
    // Threads.
    (
        "16. Idle threads are parked, not ended, and reused when work comes.",
        &["mission::threads::idle_threads_park_and_are_reused"],
    ),
    (
        "17. Threads spin before they park, never more than GOMAXPROCS of them; when work appears \
         and none spins, one more is woken.",
        &[
            "mission::threads::at_most_procs_threads_spin_and_none_without_work",
            "mission::threads::new_work_wakes_an_idle_thread",
        ],
    ),
    // Blocking system calls.
    (
        "18. A goroutine in a blocking call keeps its thread; another thread serves its P, so that \
         the rest of the queue runs on.",
        &["blocking::handoff::a_blocked_goroutine_keeps_its_thread_and_its_queue_runs_on"],
    ),
    (
        "19. The P is handed off at once if the call is known to block; otherwise sysmon retakes \
         it if the call lasts.",
        &[
            "blocking::handoff::blocking_hands_off_its_p_at_once",
            "blocking::handoff::sysmon_retakes_the_p_of_an_unannounced_blocking_call",
            "blocking::handoff::short_calls_keep_their_p",
        ],
    ),
    (
        "20. On return the goroutine gets its old P if that is idle, else another idle P, else it \
         goes to the global queue and its thread parks.",
        &[
            "blocking::returning::goroutines_return_from_blocking_calls_exactly_once",
            "blocking::returning::a_returning_goroutine_gets_its_old_p_if_that_is_idle",
            "blocking::returning::a_returning_goroutine_gets_another_idle_p",
            "blocking::returning::a_returning_goroutine_queues_globally_if_no_p_is_idle",
            "blocking::returning::a_panic_in_blocking_returns_with_a_p",
            "blocking::returning::goroutines_in_short_calls_start_and_stop_promptly",
        ],
    ),
    (
        "21. The extra threads are limited and visible.",
        &[
            "blocking::threads::threads_are_limited_and_the_limit_is_reported_once",
            "blocking::threads::spare_threads_end_after_some_seconds",
        ],
    ),
    // Network.
    (
        "22. A goroutine that waits for the network occupies no thread.",
        &["poller::goroutines_that_wait_for_sockets_occupy_no_threads"],
    ),
    (
        "23. A P with empty queues polls the network; what is ready becomes runnable there.",
        &[
            "poller::an_idle_p_polls_the_network_at_once",
            "mission::queues::ready_goroutines_join_the_queue_of_the_polling_p",
        ],
    ),
    // Preemption.
    (
        "24. Channel operations, I/O, sleep and explicit yield let other goroutines run.",
        &["preempt::loops::each_call_of_the_runtime_lets_others_run"],
    ),
    (
        "25. A goroutine that runs longer than 10 ms is preempted without its cooperation.",
        &[
            "preempt::loops::endless_loops_starve_no_goroutine_and_end_with_their_runtime",
            "preempt::loops::endless_loops_take_turns_of_ten_milliseconds",
            "preempt::loops::ten_thousand_endless_loops_need_few_threads",
        ],
    ),
    (
        "26. The runtime stops code only where nothing can be corrupted.",
        &[
            "preempt::safety::preemption_in_malloc_locks_and_unwinding_corrupts_nothing",
            "trefoil/tests/torture.rs",
        ],
    ),
    // Helpers and tools.
    (
        "27. There are sleep, channels, mutexes and WaitGroup; worker pools limit concurrency.",
        &[
            "trefoil/tests/time.rs",
            "trefoil/tests/chan/main.rs",
            "trefoil/tests/sync/main.rs",
            "trefoil-examples/tests/examples.rs",
        ],
    ),
    (
        "28. Goroutines can be counted, profiled, traced and dumped.",
        &[
            "sched::go::a_new_runtime_counts_one_goroutine",
            "trefoil/tests/profile/main.rs",
            "trefoil/tests/debug/dump.rs",
        ],
    ),
    // Typical programs.
    (
        "29. Typical programs give the described results: two printers, a yield, an endless \
         printer, a blocking sleeper, GOMAXPROCS, NumGoroutine, NumCPU, a WaitGroup.",
        &[
            "mission::goroutines::computing_printers_do_not_wait_for_each_other",
            "trefoil-examples/tests/examples.rs",
        ],
    ),
];

#[test]
fn every_statement_names_tests_that_exist() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let crates = tests.ancestors().nth(2).unwrap();
    for (i, (statement, places)) in STATEMENTS.iter().enumerate() {
        assert!(statement.starts_with(&format!("{}. ", i + 1)), "{statement}");
        assert!(!places.is_empty(), "{statement}");
        for place in *places {
            if place.ends_with(".rs") {
                assert!(crates.join(place).exists(), "{place}");
                continue;
            }
            let (file, test) = place.rsplit_once("::").unwrap();
            let source = tests.join(file.replace("::", "/")).with_extension("rs");
            let text = std::fs::read_to_string(&source).unwrap_or_else(|e| panic!("{place}: {e}"));
            let is_test = ["", "#[ignore = \"takes long\"]\n"]
                .iter()
                .any(|ignored| text.contains(&format!("#[test]\n{ignored}fn {test}() {{\n")));
            assert!(is_test, "{place}");
        }
    }
}
