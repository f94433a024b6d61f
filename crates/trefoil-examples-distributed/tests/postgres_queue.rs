//! The example `postgres_queue` with a real PostgreSQL and several processes, some of which are
//! killed or stopped while they work.

use postgres::{Client, NoTls};
use std::collections::{HashMap, HashSet};
use trefoil_examples_distributed::{Output, Program, Server, wait_until};

const EXAMPLE: &str = "postgres_queue";
/// Short, so that the tests do not wait long for the jobs of a process that was killed. Long enough
/// for a busy machine: a process that does not run for this long loses its jobs.
const SHORT_LEASE_MILLIS: &str = "2000";
/// Longer than any test.
const LONG_LEASE_MILLIS: &str = "600000";

/// A PostgreSQL server with a connection of the test's own.
struct Postgres {
    server: Server,
    client: Client,
}

impl Postgres {
    fn start() -> Option<Postgres> {
        let server = trefoil_examples_distributed::postgres()?;
        let mut client = None;
        // The socket is open before the server accepts sessions.
        wait_until("a session", || {
            client = Client::connect(&server.url, NoTls).ok();
            client.is_some()
        });
        Some(Postgres { server, client: client.unwrap() })
    }

    fn submit(&self, count: usize, millis: u64) {
        let (count, millis) = (count.to_string(), millis.to_string());
        Program::run(EXAMPLE, &["submit", &self.server.url, &count, &millis]);
    }

    /// Starts a process that works.
    fn worker(&self, name: &str, goroutines: usize, lease_millis: &str) -> Program {
        let args = ["work", &self.server.url, name, &goroutines.to_string(), lease_millis];
        Program::start(EXAMPLE, &args)
    }

    /// Starts a process that prints the results.
    fn watcher(&self, after: usize) -> Program {
        Program::start(EXAMPLE, &["watch", &self.server.url, &after.to_string()])
    }

    fn number(&mut self, query: &str) -> usize {
        let number: Option<i64> = self.client.query_one(query, &[]).unwrap().get(0);
        number.unwrap_or(0) as usize
    }

    /// Returns the number of jobs in this state.
    fn count(&mut self, state: &str) -> usize {
        self.number(&format!("SELECT count(*) FROM jobs WHERE state = '{state}'"))
    }

    fn wait_until_all_finished(&mut self) {
        wait_until("the end of all jobs", || self.count("ready") + self.count("running") == 0);
    }

    /// Returns the sum of all accounts. Each job adds 1.
    fn total(&mut self) -> usize {
        self.number("SELECT sum(balance)::BIGINT FROM accounts")
    }
}

/// Ends a process as a supervisor does. Returns what it has printed.
fn stop(program: Program) -> Output {
    program.signal(libc::SIGTERM);
    let (output, status) = program.wait();
    assert!(status.success(), "{status}");
    output
}

/// Returns the attempts of each job that were printed with `word`, sorted.
fn attempts(outputs: &[Output], word: &str) -> HashMap<String, Vec<usize>> {
    let mut attempts = HashMap::<_, Vec<_>>::new();
    for line in outputs.iter().flat_map(|output| output.lines(word)) {
        let (key, attempt) = line.split_once(" attempt ").expect("a key and a number");
        attempts.entry(key.to_owned()).or_default().push(attempt.parse().unwrap());
    }
    attempts.values_mut().for_each(|numbers| numbers.sort_unstable());
    attempts
}

/// Fails if a job began more often than once and two of these attempts have the same number: then
/// the second was not marked.
fn assert_every_repetition_is_marked(began: &HashMap<String, Vec<usize>>) {
    for (key, numbers) in began {
        assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "{key}: {numbers:?}");
    }
}

#[test]
fn rows_of_a_killed_process_are_claimed_again_marked_and_have_one_effect() {
    const JOBS: usize = 2000;
    let Some(mut postgres) = Postgres::start() else { return };
    postgres.submit(JOBS, 50);
    let victim = postgres.worker("a", 64, SHORT_LEASE_MILLIS);
    let others = ["b", "c"].map(|name| postgres.worker(name, 64, SHORT_LEASE_MILLIS));
    victim.wait_for(100, "began");
    victim.signal(libc::SIGKILL);
    let (victim, status) = victim.wait();
    assert!(!status.success());
    let left_behind = "SELECT count(*) FROM jobs WHERE state = 'running' AND worker LIKE 'a-%'";
    let left_behind = postgres.number(left_behind);
    assert!(left_behind > 0, "the process was killed while it held jobs");

    postgres.wait_until_all_finished();
    let mut outputs = others.map(stop).into_iter().collect::<Vec<_>>();
    outputs.push(victim);
    assert_eq!(postgres.count("done"), JOBS);
    assert_eq!(postgres.total(), JOBS);
    let began = attempts(&outputs, "began");
    assert_eq!(began.len(), JOBS);
    assert_every_repetition_is_marked(&began);
    let again = began.values().filter(|numbers| *numbers.last().unwrap() > 1).count();
    assert!(again > 0, "none of {left_behind} jobs that were left behind was claimed again");
}

#[test]
fn sigterm_finishes_claimed_jobs_and_leaves_the_others_in_the_table() {
    const JOBS: usize = 400;
    let Some(mut postgres) = Postgres::start() else { return };
    postgres.submit(JOBS, 50);
    let first = postgres.worker("a", 8, LONG_LEASE_MILLIS);
    first.wait_for(10, "began");
    let first = stop(first);
    let began = first.lines("began").len();
    assert_eq!(first.lines("done").len(), began);
    assert_eq!(first.lines("stopped").len(), 1);
    assert_eq!(postgres.count("running"), 0);
    assert_eq!(postgres.count("ready"), JOBS - began);
    assert!(began < JOBS, "the signal came before the last job");

    let second = postgres.worker("b", 100, LONG_LEASE_MILLIS);
    postgres.wait_until_all_finished();
    let began = attempts(&[first, stop(second)], "began");
    assert_eq!(began.len(), JOBS);
    assert!(began.values().all(|numbers| *numbers == [1]));
    assert_eq!(postgres.total(), JOBS);
}

#[test]
fn an_attempt_that_slept_past_its_lease_is_refused() {
    const JOBS: usize = 100;
    let Some(mut postgres) = Postgres::start() else { return };
    postgres.submit(JOBS, 200);
    let sleeper = postgres.worker("a", 8, SHORT_LEASE_MILLIS);
    sleeper.wait_for(12, "began");
    sleeper.signal(libc::SIGSTOP);
    let other = postgres.worker("b", 50, SHORT_LEASE_MILLIS);
    postgres.wait_until_all_finished();
    sleeper.signal(libc::SIGCONT);
    sleeper.wait_for(1, "superseded");
    let outputs = [stop(sleeper), stop(other)];
    assert_eq!(postgres.total(), JOBS);
    let began = attempts(&outputs, "began");
    assert_every_repetition_is_marked(&began);
    // Each begin has one end, and of each job one end has counted.
    let (done, superseded) = (attempts(&outputs, "done"), attempts(&outputs, "superseded"));
    assert_eq!(done.len(), JOBS);
    assert_eq!(done.values().map(Vec::len).collect::<HashSet<_>>(), HashSet::from([1]));
    let ends = done.values().chain(superseded.values()).flatten().count();
    assert_eq!(ends, began.values().flatten().count());
}

#[test]
fn every_watcher_sees_every_result_once_in_the_same_order() {
    const JOBS: usize = 500;
    let Some(mut postgres) = Postgres::start() else { return };
    let early = [0, 0].map(|after| postgres.watcher(after));
    postgres.submit(JOBS, 1);
    let workers = ["a", "b"].map(|name| postgres.worker(name, 32, LONG_LEASE_MILLIS));
    // One that is killed continues where it was.
    let killed = postgres.watcher(0);
    killed.wait_for(10, "result");
    killed.signal(libc::SIGKILL);
    let mut resumed = killed.wait().0.lines("result");
    let position = resumed.last().unwrap().split(' ').next().unwrap().parse().unwrap();
    let successor = postgres.watcher(position);
    postgres.wait_until_all_finished();
    for worker in workers {
        stop(worker);
    }

    let results = "SELECT number, key, attempt FROM results ORDER BY number";
    let rows = postgres.client.query(results, &[]).unwrap();
    let expected: Vec<String> = rows
        .iter()
        .map(|row| {
            let (number, key, attempt): (i64, String, i32) = (row.get(0), row.get(1), row.get(2));
            format!("{number} {key} {attempt}")
        })
        .collect();
    assert_eq!(expected.len(), JOBS);
    // Some may have arrived between the last line that was read and the kill.
    successor.wait_for(JOBS - resumed.len(), "result");
    resumed.extend(stop(successor).lines("result"));
    assert_eq!(resumed, expected);
    for watcher in early {
        watcher.wait_for(JOBS, "result");
        assert_eq!(stop(watcher).lines("result"), expected);
    }
}

#[test]
fn a_process_that_waits_is_notified_of_new_jobs() {
    let Some(mut postgres) = Postgres::start() else { return };
    let worker = postgres.worker("a", 4, LONG_LEASE_MILLIS);
    let listens = "SELECT count(*) FROM pg_stat_activity WHERE query = 'LISTEN jobs'";
    wait_until("the session that listens", || postgres.number(listens) == 1);
    for round in 1..=3 {
        // All but the last ten keys are in the table already.
        postgres.submit(10 * round, 1);
        worker.wait_for(10 * round, "done");
    }
    assert_eq!(stop(worker).lines("notifications"), ["3"]);
    assert_eq!(postgres.total(), 30);
}

#[test]
fn a_row_that_panics_three_times_counts_as_dead() {
    let Some(mut postgres) = Postgres::start() else { return };
    postgres.submit(20, 1);
    let bad = "INSERT INTO jobs (key, account, amount, millis) VALUES ('bad', 'a', 'many', 1)";
    postgres.client.execute(bad, &[]).unwrap();
    let worker = postgres.worker("a", 4, SHORT_LEASE_MILLIS);
    postgres.wait_until_all_finished();
    let output = stop(worker);
    let failed = attempts(std::slice::from_ref(&output), "failed");
    assert_eq!(failed, HashMap::from([("bad".to_owned(), vec![1, 2, 3])]));
    assert_eq!(output.lines("dead"), ["bad"]);
    assert_eq!((postgres.count("dead"), postgres.count("done")), (1, 20));
    assert_eq!(postgres.total(), 20);
}
