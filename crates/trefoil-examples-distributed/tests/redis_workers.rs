//! The example `redis_workers` with a real Redis and several processes, some of which are killed or
//! stopped while they work.

use redis::streams::StreamPendingReply;
use redis::{Commands, Connection};
use std::collections::{HashMap, HashSet};
use trefoil_examples_distributed::{Output, Program, Server, wait_until};

const EXAMPLE: &str = "redis_workers";
/// Short, so that the tests do not wait long for the jobs of a process that was killed. Long enough
/// for a busy machine: a process that does not run for this long loses its jobs.
const SHORT_LEASE_MILLIS: &str = "2000";
/// Longer than any test.
const LONG_LEASE_MILLIS: &str = "600000";

/// A Redis server with a connection of the test's own.
struct Redis {
    server: Server,
    connection: Connection,
}

impl Redis {
    fn start() -> Option<Redis> {
        let server = trefoil_examples_distributed::redis()?;
        let client = redis::Client::open(&*server.url).unwrap();
        Some(Redis { connection: client.get_connection().unwrap(), server })
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

    /// Returns the number of jobs that are not finished.
    fn unfinished(&mut self) -> usize {
        self.connection.xlen("{jobs}").unwrap()
    }

    fn wait_until_all_finished(&mut self) {
        wait_until("the end of all jobs", || self.unfinished() == 0);
    }

    /// Returns the number of entries that were delivered and not acknowledged, by consumer.
    fn pending(&mut self) -> HashMap<String, usize> {
        let reply: StreamPendingReply = self.connection.xpending("{jobs}", "workers").unwrap();
        match reply {
            StreamPendingReply::Empty => HashMap::new(),
            StreamPendingReply::Data(data) => {
                data.consumers.into_iter().map(|c| (c.name, c.pending)).collect()
            }
        }
    }

    /// Returns the sum of all accounts. Each job adds 1.
    fn total(&mut self) -> usize {
        let accounts: HashMap<String, usize> = self.connection.hgetall("{jobs}:accounts").unwrap();
        accounts.values().sum()
    }
}

/// Ends a process as a supervisor does. Returns what it has printed.
fn stop(program: Program) -> Output {
    program.signal(libc::SIGTERM);
    let (output, status) = program.wait();
    assert!(status.success(), "{status}");
    assert_eq!(output.lines("stopped").len(), 1);
    output
}

/// Returns the deliveries of each job that were printed with `word`, sorted.
fn deliveries(outputs: &[Output], word: &str) -> HashMap<String, Vec<usize>> {
    let mut deliveries = HashMap::<_, Vec<_>>::new();
    for line in outputs.iter().flat_map(|output| output.lines(word)) {
        let (key, count) = line.split_once(" delivery ").expect("a key and a number");
        deliveries.entry(key.to_owned()).or_default().push(count.parse().unwrap());
    }
    deliveries.values_mut().for_each(|counts| counts.sort_unstable());
    deliveries
}

/// Fails if a job began more often than once and two of these deliveries have the same number: then
/// the second was not marked.
fn assert_every_repetition_is_marked(began: &HashMap<String, Vec<usize>>) {
    for (key, counts) in began {
        assert!(counts.windows(2).all(|pair| pair[0] < pair[1]), "{key}: {counts:?}");
    }
}

#[test]
fn jobs_of_a_killed_process_are_taken_over_marked_and_have_one_effect() {
    const JOBS: usize = 3000;
    let Some(mut redis) = Redis::start() else { return };
    redis.submit(JOBS, 20);
    let victim = redis.worker("a", 32, SHORT_LEASE_MILLIS);
    let others = ["b", "c"].map(|name| redis.worker(name, 32, SHORT_LEASE_MILLIS));
    victim.wait_for(100, "began");
    victim.signal(libc::SIGKILL);
    let (victim, status) = victim.wait();
    assert!(!status.success());
    let left_behind = redis.pending().get("a").copied().unwrap_or(0);
    assert!(left_behind > 0, "the process was killed while it held jobs");

    redis.wait_until_all_finished();
    let mut outputs = others.map(stop).into_iter().collect::<Vec<_>>();
    outputs.push(victim);
    assert_eq!(redis.total(), JOBS);
    assert_eq!(redis.pending().values().sum::<usize>(), 0);
    let began = deliveries(&outputs, "began");
    assert_eq!(began.len(), JOBS);
    assert_every_repetition_is_marked(&began);
    let again = began.values().filter(|counts| *counts.last().unwrap() > 1).count();
    assert!(again > 0, "none of {left_behind} jobs that were left behind was delivered again");
}

#[test]
fn sigterm_finishes_running_jobs_and_leaves_the_others_in_the_stream() {
    const JOBS: usize = 400;
    let Some(mut redis) = Redis::start() else { return };
    redis.submit(JOBS, 50);
    let first = redis.worker("a", 8, LONG_LEASE_MILLIS);
    first.wait_for(10, "began");
    let first = stop(first);
    let began = first.lines("began").len();
    assert_eq!(first.lines("done").len(), began);
    assert_eq!(redis.pending().values().sum::<usize>(), 0);
    assert_eq!(redis.unfinished(), JOBS - began);
    assert!(began < JOBS, "the signal came before the last job");

    let second = redis.worker("b", 100, LONG_LEASE_MILLIS);
    redis.wait_until_all_finished();
    let began = deliveries(&[first, stop(second)], "began");
    assert_eq!(began.len(), JOBS);
    assert!(began.values().all(|counts| *counts == [1]));
    assert_eq!(redis.total(), JOBS);
}

#[test]
fn a_process_that_slept_past_its_lease_repeats_no_effect() {
    const JOBS: usize = 100;
    let Some(mut redis) = Redis::start() else { return };
    redis.submit(JOBS, 200);
    let sleeper = redis.worker("a", 8, SHORT_LEASE_MILLIS);
    sleeper.wait_for(12, "began");
    sleeper.signal(libc::SIGSTOP);
    let other = redis.worker("b", 50, SHORT_LEASE_MILLIS);
    redis.wait_until_all_finished();
    assert_eq!(redis.total(), JOBS);
    sleeper.signal(libc::SIGCONT);
    // The entries that it held were given to the other process, so it still believes to hold them.
    sleeper.wait_for(1, "repeated");
    let outputs = [stop(sleeper), stop(other)];
    assert_eq!(redis.total(), JOBS);
    let began = deliveries(&outputs, "began");
    assert_every_repetition_is_marked(&began);
    // Each begin has one end, and of each job one end has counted.
    let (done, repeated) = (deliveries(&outputs, "done"), deliveries(&outputs, "repeated"));
    assert_eq!(done.values().map(Vec::len).collect::<HashSet<_>>(), HashSet::from([1]));
    let ends = done.values().chain(repeated.values()).flatten().count();
    assert_eq!(ends, began.values().flatten().count());
}

#[test]
fn a_job_that_is_submitted_twice_has_one_effect() {
    const JOBS: usize = 50;
    let Some(mut redis) = Redis::start() else { return };
    redis.submit(JOBS, 1);
    redis.submit(JOBS, 1);
    let worker = redis.worker("a", 16, LONG_LEASE_MILLIS);
    redis.wait_until_all_finished();
    let output = stop(worker);
    assert_eq!(output.lines("done").len(), JOBS);
    assert_eq!(output.lines("repeated").len(), JOBS);
    assert_eq!(redis.total(), JOBS);
}

#[test]
fn a_job_that_panics_three_times_goes_to_the_dead_jobs() {
    let Some(mut redis) = Redis::start() else { return };
    let bad = [("key", "bad"), ("account", "account-0"), ("amount", "many"), ("millis", "1")];
    let _: String = redis.connection.xadd("{jobs}", "*", &bad).unwrap();
    redis.submit(20, 1);
    let worker = redis.worker("a", 4, SHORT_LEASE_MILLIS);
    redis.wait_until_all_finished();
    let output = stop(worker);
    let failed = deliveries(std::slice::from_ref(&output), "failed");
    assert_eq!(failed, HashMap::from([("bad".to_owned(), vec![1, 2, 3])]));
    assert_eq!(output.lines("dead"), ["bad"]);
    assert_eq!(redis.connection.xlen::<_, usize>("{jobs}:dead").unwrap(), 1);
    assert_eq!(redis.total(), 20);
}
