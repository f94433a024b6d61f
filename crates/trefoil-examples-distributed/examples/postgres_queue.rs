//! A queue and a feed of results in PostgreSQL: several processes, each with many goroutines, share
//! the jobs of one table, and every process that watches sees every result in the same order.
//!
//! `cargo run --release -p trefoil-examples-distributed --example postgres_queue -- COMMAND`, where
//! COMMAND is one of
//!
//! - `submit URL COUNT MILLIS`: adds COUNT jobs that take MILLIS each.
//! - `work URL NAME GOROUTINES LEASE_MILLIS`: works until SIGTERM or SIGINT.
//! - `watch URL AFTER`: prints all results after the number AFTER, and new ones until SIGTERM or
//!   SIGINT.
//!
//! # What it guarantees
//! 1. **No job is lost when a process dies.** A claim is a lease that the process extends while it
//!    works. When the lease has ended, the next claim takes the row again. `FOR UPDATE SKIP LOCKED`
//!    lets any number of goroutines claim rows at the same time without waiting for each other.
//! 2. **A job has its effect once.** One statement marks the row as done, applies the effect and
//!    adds the result. It does nothing if another attempt has begun meanwhile: the number of the
//!    attempt is a fencing token.
//! 3. **A job that may have begun before is marked.** The claim commits the number of the attempt
//!    before the work begins, so the worker can be careful with effects outside of the database.
//!    Here that effect is a line on stdout.
//! 4. **A watcher misses no result.** `NOTIFY` reaches only sessions that listen at that moment, so
//!    it is a hint to read the table, and the table is read at intervals too.
//!
//! The goroutines share a few connections: a goroutine that works on a job holds none.

use postgres::fallible_iterator::FallibleIterator;
use postgres::{Client, NoTls, Row};
use std::collections::HashSet;
use std::convert::Infallible;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;
use trefoil::chan::{self, Receiver, RecvTimeoutError, Sender};
use trefoil::context::Context;
use trefoil::signal::{self, SIGINT, SIGTERM};
use trefoil::sync::{ErrGroup, Mutex};

/// The connections that the goroutines of a process share.
const CONNECTIONS: usize = 8;
/// How long a session waits for notifications before the table is read without one. This delays the
/// end of a process after SIGTERM.
const POLL: Duration = Duration::from_millis(200);
/// How often a job is tried before it counts as dead.
const MAX_ATTEMPTS: i32 = 3;

const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS jobs (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        key TEXT NOT NULL UNIQUE, -- a job that is submitted twice is one row
        account TEXT NOT NULL,
        amount TEXT NOT NULL,
        millis BIGINT NOT NULL,
        state TEXT NOT NULL DEFAULT 'ready' CHECK (state IN ('ready', 'running', 'done', 'dead')),
        attempt INT NOT NULL DEFAULT 0,
        worker TEXT,
        lease_end TIMESTAMPTZ NOT NULL DEFAULT now()
    );
    -- Rows that are done are not in the index: a claim does not become slower with their number.
    CREATE INDEX IF NOT EXISTS open_jobs ON jobs (id) WHERE state IN ('ready', 'running');
    CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY, balance BIGINT NOT NULL);
    CREATE TABLE IF NOT EXISTS results (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,
        attempt INT NOT NULL
    );

    -- Marks the job as done, applies its effect and adds its result, unless another attempt has
    -- begun. Returns whether it did. A function, because a process that is stopped between two
    -- statements of a transaction would keep its locks, and all others would wait.
    CREATE OR REPLACE FUNCTION finish_job(job BIGINT, number INT, owner TEXT, amount BIGINT)
    RETURNS BOOLEAN LANGUAGE plpgsql AS $$
    BEGIN
        UPDATE jobs SET state = 'done'
            WHERE id = job AND attempt = number AND state = 'running';
        IF NOT FOUND THEN
            RETURN false;
        END IF;
        INSERT INTO accounts VALUES (owner, amount)
            ON CONFLICT (name) DO UPDATE SET balance = accounts.balance + excluded.balance;
        -- Held from the moment that the result gets its number until it is visible. Otherwise a
        -- watcher could see number 8 before number 7, and never read 7. It is the last lock that is
        -- taken, so there is no deadlock.
        PERFORM pg_advisory_xact_lock(2);
        INSERT INTO results (key, attempt) SELECT key, number FROM jobs WHERE id = job;
        NOTIFY results;
        RETURN true;
    END $$";

/// Takes the oldest job that is ready or whose lease has ended. Rows that another claim has locked
/// are skipped.
const CLAIM: &str = "
    UPDATE jobs SET state = 'running', attempt = attempt + 1, worker = $1,
        lease_end = clock_timestamp() + $2::BIGINT * INTERVAL '1 ms'
    WHERE id = (
        SELECT id FROM jobs
        WHERE state IN ('ready', 'running') AND (state = 'ready' OR lease_end < clock_timestamp())
        ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED
    )
    RETURNING id, key, account, amount, millis, attempt";

const BURY: &str =
    "UPDATE jobs SET state = 'dead' WHERE id = $1 AND attempt = $2 AND state = 'running'";

const EXTEND: &str = "
    UPDATE jobs SET lease_end = clock_timestamp() + $2::BIGINT * INTERVAL '1 ms'
    WHERE id = ANY($3) AND worker = $1 AND state = 'running'";

type AnyError = Box<dyn Error + Send + Sync>;

#[trefoil::main]
fn main() -> Result<(), AnyError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["submit", url, count, millis] => submit(url, count.parse()?, millis.parse()?),
        ["work", url, name, goroutines, lease_millis] => {
            work(url, name, goroutines.parse()?, lease_millis.parse()?)
        }
        ["watch", url, after] => watch(url, after.parse()?),
        _ => {
            Err("submit URL COUNT MILLIS | work URL NAME GOROUTINES LEASE_MILLIS | watch URL AFTER"
                .into())
        }
    }
}

fn connect(url: &str) -> Result<Client, postgres::Error> {
    Client::connect(url, NoTls)
}

/// Connects, and creates the tables if they are missing.
fn connect_and_set_up(url: &str) -> Result<Client, postgres::Error> {
    let mut client = connect(url)?;
    // The lock keeps two processes from creating the same table. One message is one transaction: a
    // process that is stopped here does not keep the lock.
    client.batch_execute(&format!("SELECT pg_advisory_xact_lock(1); {TABLES}"))?;
    Ok(client)
}

/// Returns a context that is done after SIGTERM or SIGINT, or when `parent` is.
fn until_signal(parent: &Context) -> std::io::Result<Context> {
    let signals = signal::notify(&[SIGTERM, SIGINT])?;
    let (ctx, cancel) = parent.with_cancel();
    trefoil::go(move || {
        let _ = signals.recv();
        cancel.cancel();
    });
    Ok(ctx)
}

fn submit(url: &str, count: i64, millis: i64) -> Result<(), AnyError> {
    let mut client = connect_and_set_up(url)?;
    let mut transaction = client.transaction()?;
    transaction.execute(
        "INSERT INTO jobs (key, account, amount, millis)
         SELECT 'job-' || n, 'account-' || n % 10, '1', $2
         FROM generate_series(0, $1::BIGINT - 1) AS n
         ON CONFLICT (key) DO NOTHING",
        &[&count, &millis],
    )?;
    // Sent when the rows are visible. Equal notifications of a transaction are sent once.
    transaction.execute("NOTIFY jobs", &[])?;
    transaction.commit()?;
    println!("submitted {count}");
    Ok(())
}

/// Calls `on_hint` first, after each notification of `channel`, and after each [`POLL`], until the
/// context is done. Returns the number of notifications.
fn listen(
    client: &mut Client,
    channel: &str,
    ctx: &Context,
    mut on_hint: impl FnMut(&mut Client) -> Result<(), AnyError>,
) -> Result<usize, AnyError> {
    // First listen, then read: a row that is added between the two is seen twice, not never.
    client.batch_execute(&format!("LISTEN {channel}"))?;
    let mut received = 0;
    while ctx.err().is_none() {
        on_hint(client)?;
        let mut notifications = client.notifications();
        received += usize::from(notifications.timeout_iter(POLL).next()?.is_some());
        // The next call of `on_hint` reads whatever these are about.
        received += notifications.iter().count()?;
    }
    Ok(received)
}

fn watch(url: &str, after: i64) -> Result<(), AnyError> {
    let ctx = until_signal(&Context::background())?;
    // A program that must not print a result twice stores the position with what it does.
    let mut position = after;
    listen(&mut connect_and_set_up(url)?, "results", &ctx, |client| {
        let rows = "SELECT number, key, attempt FROM results WHERE number > $1 ORDER BY number";
        for row in client.query(rows, &[&position])? {
            position = row.get(0);
            println!("result {position} {} {}", row.get::<_, String>(1), row.get::<_, i32>(2));
        }
        Ok(())
    })?;
    Ok(())
}

/// A job that this process has claimed.
struct Job {
    id: i64,
    key: String,
    account: String,
    amount: String,
    millis: i64,
    /// 1 if no process had the job before.
    attempt: i32,
}

impl From<Row> for Job {
    fn from(row: Row) -> Job {
        Job {
            id: row.get("id"),
            key: row.get("key"),
            account: row.get("account"),
            amount: row.get("amount"),
            millis: row.get("millis"),
            attempt: row.get("attempt"),
        }
    }
}

/// What the goroutines of a process share.
#[derive(Clone)]
struct Process {
    /// Unique: its leases must not look like those of an earlier process.
    name: Arc<str>,
    lease_millis: i64,
    /// The connections that no goroutine uses.
    pool: (Sender<Client>, Receiver<Client>),
    /// A value for a worker that should try to claim a job.
    wake_ups: (Sender<()>, Receiver<()>),
    held: Arc<Mutex<HashSet<i64>>>,
}

fn work(url: &str, name: &str, goroutines: usize, lease_millis: i64) -> Result<(), AnyError> {
    let (group, ctx) = ErrGroup::with_context(&Context::background());
    let ctx = until_signal(&ctx)?;
    let process = Process {
        name: format!("{name}-{}", std::process::id()).into(),
        lease_millis,
        pool: chan::bounded(CONNECTIONS),
        wake_ups: chan::bounded(1),
        held: Arc::default(),
    };
    // These two have connections of their own: they must not wait behind the workers.
    let (mut listener, mut extender) = (connect_and_set_up(url)?, connect(url)?);
    for _ in 0..CONNECTIONS {
        process.give_back(connect(url)?);
    }
    // Each worker holds a sender. The leases are extended until the last of them is dropped.
    let (alive, all_ended) = chan::bounded::<Infallible>(0);
    for _ in 0..goroutines {
        let (process, ctx, alive) = (process.clone(), ctx.clone(), alive.clone());
        group.go(move || {
            let _alive = alive;
            process.run_jobs(&ctx)
        });
    }
    drop(alive);
    group.go({
        let process = process.clone();
        move || process.extend_leases(&mut extender, all_ended)
    });
    group.go(move || {
        let received = listen(&mut listener, "jobs", &ctx, |_| {
            process.wake_one();
            Ok(())
        })?;
        println!("notifications {received}");
        Ok(())
    });
    println!("working");
    group.wait()?;
    println!("stopped");
    Ok(())
}

impl Process {
    /// Gives a connection to the next goroutine that needs one.
    fn give_back(&self, client: Client) {
        self.pool.0.send(client).expect("the receiver is in the same struct");
    }

    /// Waits for a connection, calls `f` and gives the connection back. An error ends the process.
    fn with_connection<T>(
        &self,
        f: impl FnOnce(&mut Client) -> Result<T, postgres::Error>,
    ) -> Result<T, AnyError> {
        let mut client = self.pool.1.recv()?;
        let result = f(&mut client);
        self.give_back(client);
        Ok(result?)
    }

    /// Wakes a worker, unless a woken worker has not run yet.
    fn wake_one(&self) {
        let _ = self.wake_ups.0.try_send(());
    }

    /// Runs jobs, one after the other, until the context is done.
    fn run_jobs(&self, ctx: &Context) -> Result<(), AnyError> {
        while ctx.err().is_none() {
            let claim =
                |client: &mut Client| client.query_opt(CLAIM, &[&&*self.name, &self.lease_millis]);
            let Some(row) = self.with_connection(claim)? else {
                trefoil::select! {
                    recv(self.wake_ups.1) -> _ => {}
                    recv(ctx.done()) -> _ => {}
                }
                continue;
            };
            // There may be more jobs: workers wake each other until a claim finds none.
            self.wake_one();
            let job = Job::from(row);
            self.held.lock().insert(job.id);
            let result = self.run_job(&job);
            self.held.lock().remove(&job.id);
            result?;
        }
        Ok(())
    }

    fn run_job(&self, job: &Job) -> Result<(), AnyError> {
        let Job { id, key, attempt, .. } = job;
        if *attempt > MAX_ATTEMPTS {
            self.with_connection(|client| client.execute(BURY, &[id, attempt]))?;
            println!("dead {key}");
            return Ok(());
        }
        // The effect outside of the database, with its mark.
        println!("began {key} attempt {attempt}");
        let (amount, millis) = (job.amount.clone(), job.millis as u64);
        // A panic of the job ends its own goroutine only. Its lease is not extended any more.
        let work = trefoil::go(move || {
            let amount: i64 = amount.parse().expect("the amount is a number");
            std::thread::sleep(Duration::from_millis(millis));
            amount
        });
        let Ok(amount) = work.join() else {
            println!("failed {key} attempt {attempt}");
            return Ok(());
        };
        let finished = self.with_connection(|client| {
            client.query_one(
                "SELECT finish_job($1, $2, $3, $4)",
                &[id, attempt, &job.account, &amount],
            )
        })?;
        let finished: bool = finished.get(0);
        println!("{} {key} attempt {attempt}", if finished { "done" } else { "superseded" });
        Ok(())
    }

    /// Extends the leases of the jobs that the process holds, until all workers have ended.
    fn extend_leases(
        &self,
        client: &mut Client,
        all_ended: Receiver<Infallible>,
    ) -> Result<(), AnyError> {
        let pause = Duration::from_millis(self.lease_millis as u64 / 4);
        while let Err(RecvTimeoutError::Timeout) = all_ended.recv_timeout(pause) {
            let ids: Vec<i64> = self.held.lock().iter().copied().collect();
            client.execute(EXTEND, &[&&*self.name, &self.lease_millis, &ids])?;
        }
        Ok(())
    }
}
