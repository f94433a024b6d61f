//! Go's own benchmarks, by Go's names: the counterpart of go/own_test.go, in its order. First what
//! stands for Go's package testing.

use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bench_common::{Args, Report, size, step};
use trefoil::chan::{Receiver, Sender, bounded};
use trefoil::sync::{Condvar, Mutex, Once, RwLock, WaitGroup};
use trefoil::time::{Ticker, Timer, after, after_func, sleep};
use trefoil::{go, procs, scope, select, set_procs};

type Body = fn(&mut B);

const BENCHMARKS: &[(&str, Body)] = &[
    ("ChanNonblocking", chan_nonblocking),
    ("ChanUncontended", chan_uncontended),
    ("ChanContended", chan_contended),
    ("ChanSync", chan_sync),
    ("ChanProdCons0", |b| prod_cons(b, 0)),
    ("ChanProdCons10", |b| prod_cons(b, 10)),
    ("ChanProdCons100", |b| prod_cons(b, 100)),
    ("ChanCreation", chan_creation),
    ("ChanSem", chan_sem),
    ("ChanPopular", chan_popular),
    ("ChanClosed", chan_closed),
    ("SelectUncontended", select_uncontended),
    ("SelectAsyncContended", select_async_contended),
    ("SelectSyncContended", select_sync_contended),
    ("SelectNonblock", select_nonblock),
    ("CreateGoroutines", |b| chains(b, 1)),
    ("CreateGoroutinesParallel", |b| chains(b, procs())),
    ("CreateGoroutinesSingle", create_goroutines_single),
    ("PingPongHog", ping_pong_hog),
    ("MutexUncontended", mutex_uncontended),
    ("Mutex", |b| locking(b, 1, false)),
    ("MutexSlack", |b| locking(b, 10, false)),
    ("MutexWork", |b| locking(b, 1, true)),
    ("MutexWorkSlack", |b| locking(b, 10, true)),
    ("MutexSpin", mutex_spin),
    ("MutexNoSpin", mutex_no_spin),
    ("RWMutexUncontended", rw_mutex_uncontended),
    ("RWMutexWrite100", |b| reading(b, 100)),
    ("RWMutexWrite10", |b| reading(b, 10)),
    ("WaitGroupUncontended", wait_group_uncontended),
    ("WaitGroupAddDone", wait_group_add_done),
    ("WaitGroupWait", wait_group_wait),
    ("WaitGroupActuallyWait", wait_group_actually_wait),
    ("Cond1", |b| meeting(b, 1)),
    ("Cond8", |b| meeting(b, 8)),
    ("Cond32", |b| meeting(b, 32)),
    ("Once", once),
    ("AfterFunc1000", after_func_1000),
    ("SimultaneousAfterFunc1000", simultaneous_after_func_1000),
    ("After", after_1),
    ("Stop", stop),
    ("StartStop1000", start_stop_1000),
    ("Reset", reset),
    ("Sleep1000", sleep_1000),
    ("Ticker", ticker),
    ("TickerReset", ticker_reset),
];

/// All of them, or only the `n`-th, counted from one (`n=`); nanoseconds by name.
pub fn all(args: &Args) -> Report {
    let budget = args.time(size::GOBENCH_TIME);
    let only = args.number("n", 0);
    let chosen = BENCHMARKS.iter().zip(1..).filter(|(_, i)| only == 0 || only == *i);
    chosen
        .fold(Report::new(), |report, ((name, body), _)| report.with(name, measure(budget, *body)))
}

/// More and more rounds, until they take as long as they should; time of one, in nanoseconds.
fn measure(budget: Duration, body: Body) -> f64 {
    let (mut n, mut grain) = (1, 1);
    loop {
        let mut b = B { n, grain, start: Instant::now(), took: None };
        body(&mut b);
        let took = b.took.unwrap_or_else(|| b.start.elapsed()).as_nanos().max(1) as f64;
        let each = took / n as f64;
        if took >= budget.as_nanos() as f64 {
            return each;
        }
        // As Go does: a fifth more than it seems to need; a share takes a tenth of a millisecond.
        let needed = budget.as_nanos() as f64 / each * 1.2;
        n = (needed as usize).clamp(n + 1, n * 100);
        grain = ((1e5 / each) as usize).clamp(1, 10_000);
    }
}

/// One try with a number of rounds.
struct B {
    n: usize,
    /// Rounds that a goroutine claims at a time.
    grain: usize,
    start: Instant,
    took: Option<Duration>,
}

impl B {
    fn reset_timer(&mut self) {
        self.start = Instant::now();
    }

    fn stop_timer(&mut self) {
        self.took = Some(self.start.elapsed());
    }

    /// `each` goroutines per P share the rounds.
    fn run_parallel(&self, each: usize, body: impl Fn(&mut Rounds<'_>) + Sync) {
        let claimed = AtomicUsize::new(0);
        scope(|s| {
            for _ in 0..each * procs() {
                s.go(|| body(&mut Rounds { b: self, claimed: &claimed, mine: 0 }));
            }
        });
        assert!(claimed.into_inner() >= self.n);
    }
}

/// What one goroutine has of the rounds.
struct Rounds<'a> {
    b: &'a B,
    claimed: &'a AtomicUsize,
    mine: usize,
}

impl Rounds<'_> {
    fn next(&mut self) -> bool {
        if self.mine == 0 {
            let before = self.claimed.fetch_add(self.b.grain, Ordering::Relaxed);
            self.mine = self.b.grain.min(self.b.n.saturating_sub(before));
            if self.mine == 0 {
                return false;
            }
        }
        self.mine -= 1;
        true
    }
}

/// A cache line of its own, and its neighbour's.
#[repr(align(128))]
struct Padded<T>(T);

fn chan_nonblocking(b: &mut B) {
    let (_send, receive) = bounded::<i32>(0);
    b.run_parallel(1, |rounds| {
        while rounds.next() {
            assert!(receive.try_recv().is_err());
        }
    });
}

fn bursts(rounds: &mut Rounds, send: &Sender<i32>, receive: &Receiver<i32>) {
    while rounds.next() {
        for _ in 0..size::BURST {
            send.send(0).unwrap();
        }
        for _ in 0..size::BURST {
            receive.recv().unwrap();
        }
    }
}

fn chan_uncontended(b: &mut B) {
    b.run_parallel(1, |rounds| {
        let (send, receive) = bounded(size::BURST);
        bursts(rounds, &send, &receive);
    });
}

fn chan_contended(b: &mut B) {
    let (send, receive) = bounded(size::BURST * procs());
    b.run_parallel(1, |rounds| bursts(rounds, &send, &receive));
}

fn chan_sync(b: &mut B) {
    let n = b.n / 2;
    let (send, receive) = bounded(0);
    let (there, here) = (send.clone(), receive.clone());
    let other = go(move || {
        for _ in 0..n {
            there.send(0).unwrap();
            here.recv().unwrap();
        }
    });
    for _ in 0..n {
        receive.recv().unwrap();
        send.send(0).unwrap();
    }
    other.join().unwrap();
}

/// A producer and a consumer for each P, all on one channel; a zero ends a consumer.
fn prod_cons(b: &mut B, slots: usize) {
    let left = AtomicI64::new((b.n / size::BATCH) as i64);
    let (send, receive) = bounded(slots);
    scope(|s| {
        for _ in 0..procs() {
            s.go(|| {
                while left.fetch_sub(1, Ordering::Relaxed) > 0 {
                    for _ in 0..size::BATCH {
                        send.send(1).unwrap();
                    }
                }
                send.send(0).unwrap();
            });
            s.go(|| while receive.recv() != Ok(0) {});
        }
    });
}

fn chan_creation(b: &mut B) {
    b.run_parallel(1, |rounds| {
        while rounds.next() {
            let (send, receive) = bounded(1);
            send.send(0).unwrap();
            receive.recv().unwrap();
        }
    });
}

fn chan_sem(b: &mut B) {
    let (send, receive) = bounded(procs());
    b.run_parallel(1, |rounds| {
        while rounds.next() {
            send.send(()).unwrap();
            receive.recv().unwrap();
        }
    });
}

fn chan_popular(b: &mut B) {
    let n = b.n;
    let (_send, shared) = bounded::<bool>(0);
    let (handles, own): (Vec<_>, Vec<_>) = (0..size::POPULAR)
        .map(|_| {
            let (send, mine) = bounded::<bool>(0);
            let shared = shared.clone();
            let waiter = go(move || {
                for _ in 0..n {
                    select! {
                        recv(shared) -> _ => unreachable!(),
                        recv(mine) -> value => assert!(value.unwrap()),
                    }
                }
            });
            (waiter, send)
        })
        .unzip();
    for _ in 0..n {
        for channel in &own {
            channel.send(true).unwrap();
        }
    }
    for handle in handles {
        handle.join().unwrap();
    }
}

fn chan_closed(b: &mut B) {
    let (send, receive) = bounded::<()>(0);
    send.close();
    b.run_parallel(1, |rounds| {
        while rounds.next() {
            select! {
                recv(receive) -> value => assert!(value.is_err()),
                default => panic!("it is closed"),
            }
        }
    });
}

type Channel = (Sender<i32>, Receiver<i32>);

/// Takes a token out of one channel, whichever has it, and puts it into the other.
fn to_and_fro(rounds: &mut Rounds, (send1, receive1): &Channel, (send2, receive2): &Channel) {
    send1.send(0).unwrap();
    while rounds.next() {
        select! {
            recv(receive1) -> _ => send2.send(0).unwrap(),
            recv(receive2) -> _ => send1.send(0).unwrap(),
        }
    }
}

fn select_uncontended(b: &mut B) {
    b.run_parallel(1, |rounds| to_and_fro(rounds, &bounded(1), &bounded(1)));
}

fn select_async_contended(b: &mut B) {
    let (c1, c2) = (bounded(procs()), bounded(procs()));
    b.run_parallel(1, |rounds| to_and_fro(rounds, &c1, &c2));
}

fn select_sync_contended(b: &mut B) {
    let [(s1, r1), (s2, r2), (s3, r3)] = std::array::from_fn(|_| bounded(0));
    let (done, ended) = bounded::<()>(0);
    b.run_parallel(1, |rounds| {
        let (s1, s2, s3, ended) = (s1.clone(), s2.clone(), s3.clone(), ended.clone());
        go(move || {
            loop {
                select! {
                    send(s1, 0) -> _ => {}
                    send(s2, 0) -> _ => {}
                    send(s3, 0) -> _ => {}
                    recv(ended) -> _ => return,
                }
            }
        });
        while rounds.next() {
            select! {
                recv(r1) -> value => value.unwrap(),
                recv(r2) -> value => value.unwrap(),
                recv(r3) -> value => value.unwrap(),
            };
        }
    });
    done.close();
}

fn select_nonblock(b: &mut B) {
    let ((_s1, r1), (s2, _r2)) = (bounded::<i32>(0), bounded::<i32>(0));
    let ((_s3, r3), (s4, _r4)) = (bounded::<i32>(1), bounded::<i32>(1));
    b.run_parallel(1, |rounds| {
        while rounds.next() {
            select! { recv(r1) -> _ => {} default => {} }
            select! { send(s2, 0) -> _ => {} default => {} }
            select! { recv(r3) -> _ => {} default => {} }
            select! { send(s4, 0) -> _ => {} default => {} }
        }
    });
}

/// Goroutines that each start the next one and end.
fn chains(b: &mut B, n: usize) {
    fn link(left: usize, done: Sender<()>) {
        match left {
            0 => done.send(()).unwrap(),
            _ => drop(go(move || link(left - 1, done))),
        }
    }
    let (done, ended) = bounded(0);
    for _ in 0..n {
        let (left, done) = (b.n / n, done.clone());
        go(move || link(left, done));
    }
    for _ in 0..n {
        ended.recv().unwrap();
    }
}

fn create_goroutines_single(b: &mut B) {
    let group = WaitGroup::new();
    for _ in 0..b.n {
        group.go(|| {});
    }
    group.wait();
}

/// Two goroutines play beside one that never waits, on one P.
fn ping_pong_hog(b: &mut B) {
    let before = set_procs(1);
    let ((ping, pinged), (pong, ponged)) = (bounded::<bool>(0), bounded(0));
    let (stop, stopped) = bounded::<()>(0);
    let hog = go(move || {
        loop {
            select! { recv(stopped) -> _ => return, default => {} }
        }
    });
    go(move || {
        for value in pinged {
            pong.send(value).unwrap();
        }
    });
    b.reset_timer();
    for _ in 0..b.n {
        ping.send(true).unwrap();
        assert!(ponged.recv().unwrap());
    }
    b.stop_timer();
    stop.close();
    hog.join().unwrap();
    set_procs(before);
}

fn mutex_uncontended(b: &mut B) {
    b.run_parallel(1, |rounds| {
        let lock = Padded(Mutex::new(()));
        while rounds.next() {
            drop(lock.0.lock());
        }
    });
}

/// `each` goroutines per P at one lock, with arithmetic in between or not.
fn locking(b: &mut B, each: usize, working: bool) {
    let lock = Mutex::new(());
    b.run_parallel(each, |rounds| {
        let mut x = 1;
        while rounds.next() {
            drop(lock.lock());
            if working {
                x = (0..size::WORK).fold(x, |x, _| step(x));
            }
        }
        std::hint::black_box(x);
    });
}

fn touch(data: &mut [u64]) {
    for value in data.iter_mut().step_by(4) {
        *value += 1;
    }
    std::hint::black_box(data);
}

/// Goroutines with much data in their caches, one for each P.
fn mutex_spin(b: &mut B) {
    let count = Mutex::new(0);
    b.run_parallel(1, |rounds| {
        let mut data = vec![0; 16 << 10];
        while rounds.next() {
            *count.lock() += 1;
            touch(&mut data);
        }
    });
    assert_eq!(count.into_inner(), b.n);
}

/// More goroutines than P, which let others run while they work.
fn mutex_no_spin(b: &mut B) {
    let count = Mutex::new(0);
    b.run_parallel(4, |rounds| {
        let mut data = vec![0; 4 << 10];
        let (send, receive) = bounded(0);
        for i in (0..).take_while(|_| rounds.next()) {
            if i % 4 == 0 {
                *count.lock() += 1;
            } else {
                touch(&mut data);
                let send = send.clone();
                go(move || send.send(true).unwrap());
                receive.recv().unwrap();
            }
        }
    });
}

fn rw_mutex_uncontended(b: &mut B) {
    b.run_parallel(1, |rounds| {
        let lock = Padded(RwLock::new(()));
        while rounds.next() {
            let first = lock.0.read();
            drop(lock.0.read());
            drop(first);
            drop(lock.0.write());
        }
    });
}

/// Writes once in so many rounds.
fn reading(b: &mut B, write: usize) {
    let lock = RwLock::new(());
    b.run_parallel(1, |rounds| {
        for i in (1..).take_while(|_| rounds.next()) {
            if i % write == 0 {
                drop(lock.write());
            } else {
                drop(lock.read());
            }
        }
    });
}

fn wait_group_uncontended(b: &mut B) {
    b.run_parallel(1, |rounds| {
        let group = Padded(WaitGroup::new());
        while rounds.next() {
            group.0.add(1);
            group.0.done();
            group.0.wait();
        }
    });
}

fn wait_group_add_done(b: &mut B) {
    let group = WaitGroup::new();
    b.run_parallel(1, |rounds| {
        while rounds.next() {
            group.add(1);
            group.done();
        }
    });
}

fn wait_group_wait(b: &mut B) {
    let group = WaitGroup::new();
    b.run_parallel(1, |rounds| {
        while rounds.next() {
            group.wait();
        }
    });
}

fn wait_group_actually_wait(b: &mut B) {
    b.run_parallel(1, |rounds| {
        while rounds.next() {
            let group = WaitGroup::new();
            group.go(|| {});
            group.wait();
        }
    });
}

/// Goroutines wait for the last of them, again and again; the first to be done ends it.
fn meeting(b: &mut B, waiters: usize) {
    #[derive(Default)]
    struct Meeting {
        here: usize,
        over: bool,
    }
    let (meeting, changed) = (Mutex::new(Meeting::default()), Condvar::new());
    scope(|s| {
        for _ in 0..=waiters {
            s.go(|| {
                for _ in 0..b.n {
                    let mut meeting = meeting.lock();
                    if meeting.over {
                        break;
                    }
                    meeting.here += 1;
                    if meeting.here > waiters {
                        meeting.here = 0;
                        changed.notify_all();
                    } else {
                        changed.wait(&mut meeting);
                    }
                }
                meeting.lock().over = true;
                changed.notify_all();
            });
        }
    });
}

fn once(b: &mut B) {
    let once = Once::new();
    b.run_parallel(1, |rounds| {
        while rounds.next() {
            once.call_once(|| {});
        }
    });
}

const HOUR: Duration = Duration::from_secs(3_600);
const NANO: Duration = Duration::from_nanos(1);

/// Runs a body beside many timers that are far away.
fn timing(b: &mut B, body: impl Fn(&mut Rounds<'_>) + Sync) {
    let makers: Vec<_> = (0..procs()).map(|_| go(|| far_away(size::GARBAGE))).collect();
    let timers: Vec<_> = makers.into_iter().flat_map(|maker| maker.join().unwrap()).collect();
    b.reset_timer();
    b.run_parallel(1, body);
    b.stop_timer();
    stop_all(&timers);
}

fn far_away(n: usize) -> Vec<Timer> {
    (0..n).map(|_| after_func(HOUR, || {})).collect()
}

fn stop_all(timers: &[Timer]) {
    for timer in timers {
        assert!(timer.stop());
    }
}

fn after_func_1000(b: &mut B) {
    fn link(left: usize, done: Sender<()>) {
        match left {
            0 => done.send(()).unwrap(),
            _ => drop(after_func(Duration::ZERO, move || link(left - 1, done))),
        }
    }
    timing(b, |rounds| {
        while rounds.next() {
            let (done, ended) = bounded(0);
            link(size::CROWD + 1, done);
            ended.recv().unwrap();
        }
    });
}

fn simultaneous_after_func_1000(b: &mut B) {
    timing(b, |rounds| {
        while rounds.next() {
            let group = WaitGroup::new();
            group.add(size::CROWD);
            for _ in 0..size::CROWD {
                let group = group.clone();
                after_func(Duration::ZERO, move || group.done());
            }
            group.wait();
        }
    });
}

fn after_1(b: &mut B) {
    timing(b, |rounds| {
        while rounds.next() {
            after(NANO).recv().unwrap();
        }
    });
}

fn stop(b: &mut B) {
    timing(b, |rounds| {
        while rounds.next() {
            assert!(Timer::new(Duration::from_secs(1)).stop());
        }
    });
}

fn start_stop_1000(b: &mut B) {
    timing(b, |rounds| {
        while rounds.next() {
            stop_all(&far_away(size::CROWD));
        }
    });
}

fn reset(b: &mut B) {
    timing(b, |rounds| {
        let timer = Timer::new(HOUR);
        while rounds.next() {
            assert!(timer.reset(HOUR));
        }
    });
}

fn sleep_1000(b: &mut B) {
    timing(b, |rounds| {
        while rounds.next() {
            let group = WaitGroup::new();
            for _ in 0..size::CROWD {
                group.go(|| sleep(NANO));
            }
            group.wait();
        }
    });
}

fn ticker(b: &mut B) {
    timing(b, |rounds| {
        let ticker = Ticker::new(NANO);
        while rounds.next() {
            ticker.chan().recv().unwrap();
        }
    });
}

fn ticker_reset(b: &mut B) {
    timing(b, |rounds| {
        let ticker = Ticker::new(NANO);
        while rounds.next() {
            ticker.reset(2 * NANO);
        }
    });
}
