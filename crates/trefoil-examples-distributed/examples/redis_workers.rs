//! A worker pool over Redis Streams: several processes, each with many goroutines, share the jobs
//! of one consumer group.
//!
//! `cargo run --release -p trefoil-examples-distributed --example redis_workers -- COMMAND`, where
//! COMMAND is one of
//!
//! - `submit URL COUNT MILLIS`: adds COUNT jobs that take MILLIS each.
//! - `work URL NAME GOROUTINES LEASE_MILLIS`: works until SIGTERM or SIGINT. NAME must be the name
//!   of no other live process.
//!
//! # What it guarantees
//! 1. **No job is lost when a process dies.** An entry stays in the group's pending list until a
//!    script has acknowledged it. A live process extends its leases: it resets the idle time of the
//!    entries that it holds. When an entry was idle for longer than the lease, another process
//!    takes it over (`XAUTOCLAIM`).
//! 2. **A job has its effect in Redis once.** One script sets the mark "done" of the job's key,
//!    applies the effect if the mark was not set before, and acknowledges the entry. The mark
//!    expires after [`KEEP_MARK_SECS`]; a copy of the job that is submitted later than that counts
//!    as a new job.
//! 3. **A job that may have begun before is marked.** Redis counts the deliveries of an entry. The
//!    worker sees the count before it begins, so it can be careful with effects outside of Redis.
//!    Here that effect is a line on stdout. An entry that waited in a process for longer than its
//!    lease is not begun there.
//! 4. **A job that fails again and again** goes to a stream of dead jobs after [`MAX_DELIVERIES`].
//!
//! An error of Redis ends the process: a supervisor starts it again, and meanwhile other processes
//! take its jobs over. The guarantees are about the death of workers. Whether Redis itself keeps
//! its data is a matter of its persistence and replication.

use redis::streams::{
    StreamAutoClaimOptions, StreamAutoClaimReply, StreamId, StreamPendingCountReply,
    StreamReadOptions, StreamReadReply,
};
use redis::{Client, Commands, Connection, RedisResult, Script};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::convert::Infallible;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trefoil::chan::{self, Receiver, RecvTimeoutError, Sender};
use trefoil::context::Context;
use trefoil::signal::{self, SIGINT, SIGTERM};
use trefoil::sync::{ErrGroup, Mutex};

/// The braces make all keys of the example live on the same node of a cluster, as scripts require.
const JOBS: &str = "{jobs}";
const ACCOUNTS: &str = "{jobs}:accounts";
const DEAD: &str = "{jobs}:dead";
const GROUP: &str = "workers";

/// The most entries that one command takes from the stream. A process that is killed leaves this
/// many more entries to other processes than it has goroutines, twice.
const BATCH: usize = 16;
/// How long a command waits for new entries. This delays the end of the process after SIGTERM.
const BLOCK_MILLIS: usize = 200;
/// How often a job is tried before it counts as dead.
const MAX_DELIVERIES: usize = 3;
/// How long Redis remembers that a job is done: longer than any retry of its submission.
const KEEP_MARK_SECS: usize = 24 * 3600;

/// Marks the job as done and applies its effect, unless it is marked already. Acknowledges the
/// entry in both cases. Returns whether the effect was applied.
const FINISH: &str = "
    local jobs, mark, accounts = KEYS[1], KEYS[2], KEYS[3]
    local group, entry, account, amount, keep_secs = unpack(ARGV)
    local first = redis.call('SET', mark, entry, 'NX', 'EX', keep_secs)
    if first then redis.call('HINCRBY', accounts, account, amount) end
    redis.call('XACK', jobs, group, entry)
    redis.call('XDEL', jobs, entry)
    return first and 1 or 0";

/// Moves an entry to the stream of dead jobs, unless another process has finished or moved it.
const BURY: &str = "
    local jobs, dead = KEYS[1], KEYS[2]
    local group, entry, key = unpack(ARGV)
    if redis.call('XACK', jobs, group, entry) == 1 then
        redis.call('XADD', dead, '*', 'key', key, 'entry', entry)
        redis.call('XDEL', jobs, entry)
    end";

/// Resets the idle time of the entries that still belong to this consumer, and returns these.
/// `XCLAIM` alone would take back entries that another process has taken over.
const EXTEND: &str = "
    local jobs, group, consumer = KEYS[1], ARGV[1], ARGV[2]
    local extended = {}
    for at = 3, #ARGV do
        local entry = ARGV[at]
        if #redis.call('XPENDING', jobs, group, entry, entry, 1, consumer) == 1 then
            redis.call('XCLAIM', jobs, group, consumer, 0, entry, 'JUSTID')
            table.insert(extended, entry)
        end
    end
    return extended";

type AnyError = Box<dyn Error + Send + Sync>;

#[trefoil::main]
fn main() -> Result<(), AnyError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["submit", url, count, millis] => submit(url, count.parse()?, millis.parse()?),
        ["work", url, name, goroutines, lease_millis] => {
            work(Client::open(url)?, name, goroutines.parse()?, lease_millis.parse()?)
        }
        _ => Err("submit URL COUNT MILLIS | work URL NAME GOROUTINES LEASE_MILLIS".into()),
    }
}

fn submit(url: &str, count: usize, millis: u64) -> Result<(), AnyError> {
    let mut connection = Client::open(url)?.get_connection()?;
    let mut pipeline = redis::pipe();
    for n in 0..count {
        // The key names the job, not the entry. So a submission may be repeated if its answer was
        // lost.
        let (key, account) = (format!("job-{n}"), format!("account-{}", n % 10));
        let millis = millis.to_string();
        let fields =
            [("key", &*key), ("account", &*account), ("amount", "1"), ("millis", &*millis)];
        pipeline.xadd(JOBS, "*", &fields).ignore();
    }
    pipeline.exec(&mut connection)?;
    println!("submitted {count}");
    Ok(())
}

/// An entry of the stream that this process holds.
struct Delivery {
    entry: StreamId,
    /// 1 if no process had the entry before.
    count: usize,
}

impl Delivery {
    fn field(&self, name: &str) -> String {
        self.entry.get(name).unwrap_or_default()
    }
}

/// The entries that this process holds, by id, each with a time after which its lease began.
type Held = Arc<Mutex<HashMap<String, Instant>>>;

/// What the goroutines of a process share.
#[derive(Clone)]
struct Process {
    client: Client,
    name: Arc<str>,
    lease_millis: usize,
    held: Held,
}

fn work(client: Client, name: &str, goroutines: usize, lease: usize) -> Result<(), AnyError> {
    create_group(&mut client.get_connection()?)?;
    let signals = signal::notify(&[SIGTERM, SIGINT])?;
    // The context is done when a goroutine fails or when a signal has arrived.
    let (group, ctx) = ErrGroup::with_context(&Context::background());
    let (ctx, cancel) = ctx.with_cancel();
    trefoil::go(move || {
        let _ = signals.recv();
        cancel.cancel();
    });

    let process = Process { client, name: name.into(), lease_millis: lease, held: Held::default() };
    let (to_workers, inbox) = chan::bounded(0);
    // Each worker holds a sender. The leases are extended until the last of them is dropped.
    let (alive, all_ended) = chan::bounded::<Infallible>(0);
    for _ in 0..goroutines {
        let (process, inbox, alive) = (process.clone(), inbox.clone(), alive.clone());
        group.go(move || {
            let _alive = alive;
            process.run_jobs(inbox)
        });
    }
    drop((inbox, alive));
    group.go({
        let process = process.clone();
        move || process.extend_leases(all_ended)
    });
    group.go({
        let (process, ctx, to_workers) = (process.clone(), ctx.clone(), to_workers.clone());
        move || process.take_over(&ctx, &to_workers)
    });
    group.go(move || process.read_new(&ctx, &to_workers));
    println!("working");
    group.wait()?;
    println!("stopped");
    Ok(())
}

fn create_group(connection: &mut Connection) -> RedisResult<()> {
    match connection.xgroup_create_mkstream::<_, _, _, ()>(JOBS, GROUP, "0") {
        // Another process was faster.
        Err(error) if error.code() == Some("BUSYGROUP") => Ok(()),
        result => result,
    }
}

impl Process {
    /// Reads new entries until the context is done. Every entry that was read goes to a worker.
    fn read_new(&self, ctx: &Context, to_workers: &Sender<Delivery>) -> RedisResult<()> {
        let mut connection = self.client.get_connection()?;
        let options =
            StreamReadOptions::default().group(GROUP, &*self.name).count(BATCH).block(BLOCK_MILLIS);
        while ctx.err().is_none() {
            let begin = Instant::now();
            let reply: Option<StreamReadReply> =
                connection.xread_options(&[JOBS], &[">"], &options)?;
            for entry in reply.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids) {
                self.hand_over(Delivery { entry, count: 1 }, begin, to_workers);
            }
        }
        Ok(())
    }

    /// Takes over entries whose lease has ended, until the context is done.
    fn take_over(&self, ctx: &Context, to_workers: &Sender<Delivery>) -> RedisResult<()> {
        let mut connection = self.client.get_connection()?;
        let pause = Duration::from_millis(self.lease_millis as u64 / 2);
        // A command scans a part of the pending entries. The next one continues there.
        let mut cursor = "0-0".to_owned();
        loop {
            let begin = Instant::now();
            let (name, lease) = (&*self.name, self.lease_millis);
            let options = StreamAutoClaimOptions::default().count(BATCH);
            let reply: StreamAutoClaimReply =
                connection.xautoclaim_options(JOBS, GROUP, name, lease, &cursor, options)?;
            cursor = reply.next_stream_id;
            for entry in reply.claimed {
                let pending: StreamPendingCountReply =
                    connection.xpending_count(JOBS, GROUP, &entry.id, &entry.id, 1)?;
                // None if the previous owner has finished the job in this moment.
                if let Some(pending) = pending.ids.first() {
                    let count = pending.times_delivered;
                    self.hand_over(Delivery { entry, count }, begin, to_workers);
                }
            }
            if cursor != "0-0" && ctx.err().is_none() {
                continue;
            }
            trefoil::select! {
                recv(ctx.done()) -> _ => return Ok(()),
                after(pause) => {}
            }
        }
    }

    /// Waits for a worker that is free and gives it the entry.
    fn hand_over(&self, delivery: Delivery, begin: Instant, to_workers: &Sender<Delivery>) {
        // The process may take over an entry from itself, if it was stopped for longer than the
        // lease.
        if let Entry::Vacant(vacant) = self.held.lock().entry(delivery.entry.id.clone()) {
            vacant.insert(begin);
        } else {
            return;
        }
        // Fails if all workers have failed. The process is about to end.
        let _ = to_workers.send(delivery);
    }

    /// Extends the leases of the entries that the process holds, until all workers have ended.
    fn extend_leases(&self, all_ended: Receiver<Infallible>) -> RedisResult<()> {
        let mut connection = self.client.get_connection()?;
        let script = Script::new(EXTEND);
        let pause = Duration::from_millis(self.lease_millis as u64 / 4);
        while let Err(RecvTimeoutError::Timeout) = all_ended.recv_timeout(pause) {
            let begin = Instant::now();
            let entries: Vec<String> = self.held.lock().keys().cloned().collect();
            let mut call = script.key(JOBS);
            call.arg(GROUP).arg(&*self.name).arg(entries);
            let extended: Vec<String> = call.invoke(&mut connection)?;
            let mut held = self.held.lock();
            for entry in extended {
                held.entry(entry).and_modify(|lease| *lease = begin);
            }
        }
        Ok(())
    }

    /// Returns whether no other process can have taken the entry over.
    fn has_lease(&self, entry: &str) -> bool {
        let lease = Duration::from_millis(self.lease_millis as u64);
        self.held.lock().get(entry).is_some_and(|begin| begin.elapsed() < lease)
    }

    /// Runs jobs, one after the other, until the goroutines that read entries have ended.
    fn run_jobs(&self, inbox: Receiver<Delivery>) -> RedisResult<()> {
        let mut connection = self.client.get_connection()?;
        let (finish, bury) = (Script::new(FINISH), Script::new(BURY));
        for delivery in inbox {
            let (key, count) = (delivery.field("key"), delivery.count);
            let (account, amount) = (delivery.field("account"), delivery.field("amount"));
            let entry = &delivery.entry.id;
            if count > MAX_DELIVERIES {
                let mut bury = bury.key(JOBS);
                bury.key(DEAD).arg(GROUP).arg(entry).arg(&key).invoke::<()>(&mut connection)?;
                println!("dead {key}");
            } else if !self.has_lease(entry) {
                println!("lost {key} delivery {count}");
            } else {
                // The effect outside of Redis, with its mark.
                println!("began {key} delivery {count}");
                let millis = delivery.field("millis");
                // A panic of the job ends its own goroutine only. Its lease is not extended any
                // more.
                match trefoil::go(move || run_job(&amount, &millis)).join() {
                    Ok(amount) => {
                        let mut finish = finish.key(JOBS);
                        finish.key(format!("{JOBS}:done:{key}")).key(ACCOUNTS);
                        finish.arg(GROUP).arg(entry).arg(account).arg(amount).arg(KEEP_MARK_SECS);
                        let first: bool = finish.invoke(&mut connection)?;
                        println!(
                            "{} {key} delivery {count}",
                            if first { "done" } else { "repeated" }
                        );
                    }
                    Err(_) => println!("failed {key} delivery {count}"),
                }
            }
            self.held.lock().remove(entry);
        }
        Ok(())
    }
}

/// The work itself. Returns the amount for the job's account.
fn run_job(amount: &str, millis: &str) -> i64 {
    let amount = amount.parse().expect("the amount is a number");
    std::thread::sleep(Duration::from_millis(millis.parse().expect("the time is a number")));
    amount
}
