//! A goroutine owns its thread-local storage: what Rust code sees.
//!
//! Every promise is that of a thread: a value is never another goroutine's, it survives every yield and
//! park on whatever thread the goroutine wakes up, a fresh goroutine sees initial values, and every
//! destructor runs exactly once, before `join` returns. What C code sees is in `tls_c.rs`.
//!
//! Thread-local storage goes wrong in optimised builds first; run it in all of them:
//! `cargo test -p trefoil --test tls`, the same with `--release`, and with `--profile lto`.
//!
//! `TREFOIL_PROCS` wins over the number of Ps that a test names, so that the suite runs with any.

use std::any::Any;
use std::backtrace::Backtrace;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hint::black_box;
use std::io::Write;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Once};
use std::thread::{self, ThreadId};
use std::time::Duration;

use rand::{Rng, RngCore};
use trefoil::{JoinHandle, Runtime, go, yield_now};

/// The crowd of the big tests.
const MANY: usize = 10_000;
/// Ps of a runtime here, if `TREFOIL_PROCS` does not say otherwise.
const PROCS: usize = 4;
/// A test that runs longer hangs.
const LIMIT: Duration = Duration::from_secs(120);
/// Panics that begin with it are part of a test and print nothing.
const EXPECTED: &str = "expected";

/// Runs `f` as the main goroutine of a runtime of its own, under a watchdog.
fn on_goroutines<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let loud = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !text(info.payload()).starts_with(EXPECTED) {
                loud(info);
            }
        }));
    });
    let _watchdog = watchdog();
    let mut builder = Runtime::builder();
    if std::env::var_os("TREFOIL_PROCS").is_none() {
        builder = builder.procs(PROCS);
    }
    builder.build().unwrap().run(f)
}

/// Aborts the process if the result is not dropped in time. A plain thread: it must not depend on what
/// is tested.
fn watchdog() -> mpsc::Sender<()> {
    let name = thread::current().name().unwrap_or("?").to_owned();
    let (alive, gone) = mpsc::channel();
    thread::spawn(move || {
        if gone.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
            let line = format!("\nwatchdog: {name} still runs after {LIMIT:?}: it hangs\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
            std::process::abort();
        }
    });
    alive
}

fn text(payload: &(dyn Any + Send)) -> &str {
    let owned = payload.downcast_ref::<String>().map(String::as_str);
    owned.or(payload.downcast_ref::<&str>().copied()).unwrap_or("")
}

/// Joins; a panic in the goroutine becomes one here.
fn joined<T>(handle: JoinHandle<T>) -> T {
    handle.join().unwrap_or_else(|payload| panic::resume_unwind(payload))
}

/// Runs `f(0..n)` as goroutines of this runtime.
fn crowd<T: Send + 'static>(
    n: usize,
    f: impl Fn(usize) -> T + Send + Sync + 'static,
) -> Vec<JoinHandle<T>> {
    let f = Arc::new(f);
    (0..n)
        .map(|i| {
            let f = f.clone();
            go(move || f(i))
        })
        .collect()
}

fn yields(n: usize) {
    (0..n).for_each(|_| yield_now());
}

/// Holds everyone, yielding, until all have come: then all of them are alive at the same time.
struct Gate(AtomicUsize);

impl Gate {
    fn new(n: usize) -> Arc<Gate> {
        Arc::new(Gate(AtomicUsize::new(n)))
    }

    fn pass(&self) {
        self.0.fetch_sub(1, SeqCst);
        while self.0.load(SeqCst) != 0 {
            yield_now();
        }
    }
}

/// The kernel's id of the thread that runs this now; it changes when the goroutine moves.
#[inline(never)]
fn tid() -> i64 {
    // SAFETY: a system call without arguments.
    unsafe { libc::syscall(libc::SYS_gettid) }
}

fn counters(n: usize) -> Arc<[AtomicU32]> {
    (0..n).map(|_| AtomicU32::new(0)).collect()
}

// ---- values ------------------------------------------------------------------------------------

/// Counts its drop in its owner's counter, and looks at whose thread-locals it is dropped among.
struct Dropped {
    owner: usize,
    drops: Arc<[AtomicU32]>,
}

/// A destructor must not panic, so it notes.
static FOREIGN: AtomicUsize = AtomicUsize::new(0);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.drops[self.owner].fetch_add(1, SeqCst);
        if CELL.get() != self.owner + 1 {
            FOREIGN.fetch_add(1, SeqCst);
        }
    }
}

static LAZY_MADE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static CELL: Cell<usize> = const { Cell::new(0) };
    static BORROWED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    static CONST_DROP: RefCell<Option<Dropped>> = const { RefCell::new(None) };
    static LAZY_DROP: OnceCell<Dropped> = {
        LAZY_MADE.fetch_add(1, SeqCst);
        OnceCell::new()
    };
    static LAZY: RefCell<String> = RefCell::new(format!("fresh {}", CELL.get()));
}

/// One of the crowd: sets everything, yields in between, and checks that all of it is still its own.
fn live(i: usize, gate: &Gate, drops: &Arc<[AtomicU32]>) -> ThreadId {
    assert_eq!(CELL.get(), 0, "a fresh goroutine sees another's value");
    assert!(BORROWED.with_borrow(Vec::is_empty));
    assert!(CONST_DROP.with_borrow(Option::is_none));
    assert!(LAZY_DROP.with(|d| d.get().is_none()));

    let id = thread::current().id();
    CELL.set(i + 1);
    CONST_DROP.set(Some(Dropped { owner: i, drops: drops.clone() }));
    LAZY_DROP.with(|d| assert!(d.set(Dropped { owner: i, drops: drops.clone() }).is_ok()));
    assert_eq!(LAZY.with_borrow(String::clone), format!("fresh {}", i + 1));
    gate.pass();

    BORROWED.with(|list| {
        // Held across yields: any other goroutine on this RefCell panics.
        let mut list = list.borrow_mut();
        for k in 0..8 {
            list.push(i + k);
            yield_now();
            assert_eq!(list.len(), k + 1);
            assert_eq!(list[k], i + k);
            assert_eq!(CELL.get(), i + 1);
            assert_eq!(thread::current().id(), id);
        }
    });
    LAZY.with_borrow_mut(|s| {
        yields(2);
        s.push_str(" used");
    });
    yield_now();
    assert_eq!(LAZY.take(), format!("fresh {} used", i + 1));
    assert_eq!(CONST_DROP.with_borrow(|d| d.as_ref().map(|d| d.owner)), Some(i));
    assert_eq!(LAZY_DROP.with(|d| d.get().map(|d| d.owner)), Some(i));
    id
}

#[test]
fn ten_thousand_own_their_values() {
    let drops = counters(MANY);
    let all = drops.clone();
    let made = LAZY_MADE.load(SeqCst);
    CELL.set(usize::MAX);
    on_goroutines(move || {
        let gate = Gate::new(MANY);
        let d = drops.clone();
        let handles = crowd(MANY, move |i| live(i, &gate, &d));
        let mut ids = HashSet::new();
        for (i, handle) in handles.into_iter().enumerate() {
            assert!(ids.insert(joined(handle)), "two goroutines with one ThreadId");
            assert_eq!(drops[i].load(SeqCst), 2, "goroutine {i}: drops before join returned");
        }
        assert!(!ids.contains(&thread::current().id()));
        assert_eq!(CELL.get(), 0, "the main goroutine's own");
    });
    assert_eq!(CELL.get(), usize::MAX, "the plain thread's own");
    assert!(all.iter().all(|d| d.load(SeqCst) == 2), "a destructor ran twice");
    assert_eq!(FOREIGN.load(SeqCst), 0, "destructors that ran among another's thread-locals");
    assert_eq!(LAZY_MADE.load(SeqCst) - made, MANY);
}

thread_local! {
    static HITS: Cell<u32> = const { Cell::new(0) };
    static LAZY_HITS: Cell<u32> = Cell::default(); // not const: initialised at first use
}

/// The shape that is miscompiled where thread-locals are the thread's: the address of the first `with`
/// is kept in a register for the second. True if the goroutine moved in between.
fn two_withs(park: impl FnOnce()) -> bool {
    HITS.with(|hits| hits.set(hits.get() + 1));
    LAZY_HITS.with(|hits| hits.set(hits.get() + 1));
    let before = tid();
    park();
    HITS.with(|hits| hits.set(hits.get() + 1));
    LAZY_HITS.with(|hits| hits.set(hits.get() + 1));
    tid() != before
}

#[inline(never)]
fn hits() -> (u32, u32) {
    (HITS.get(), LAZY_HITS.get())
}

#[test]
fn two_withs_around_a_park() {
    const ROUNDS: u32 = 20;
    on_goroutines(|| {
        let mut moved = 0;
        // Until enough of them moved; with one P none can.
        while moved < 100 {
            let handles = crowd(600, |_| {
                let mut moved = 0;
                for round in 1..=ROUNDS {
                    moved += usize::from(if round % 2 == 0 {
                        two_withs(|| joined(go(|| yields(3))))
                    } else {
                        two_withs(|| yields(2))
                    });
                    assert_eq!(hits(), (2 * round, 2 * round));
                }
                moved
            });
            moved += handles.into_iter().map(joined).sum::<usize>();
            if trefoil::procs() == 1 {
                break;
            }
        }
        assert_eq!(hits(), (0, 0));
    });
}

#[test]
fn recycled_stacks_show_initial_values() {
    thread_local! {
        static WORDS: Cell<[u64; 32]> = const { Cell::new([0x5555; 32]) };
        static TEXT: RefCell<String> = RefCell::new("initial".to_owned());
        static KEPT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    on_goroutines(|| {
        for round in 0..200u64 {
            let handles = crowd(100, move |i| {
                assert_eq!(WORDS.get(), [0x5555; 32]);
                assert_eq!(TEXT.with_borrow(String::clone), "initial");
                assert!(KEPT.with_borrow(Vec::is_empty));
                WORDS.set([round + i as u64; 32]);
                TEXT.set(format!("{round} {i}"));
                KEPT.set(vec![1; 100]);
                if i % 3 == 0 {
                    yield_now();
                }
                // Deep enough to leave dirt where the next goroutine's frames will be.
                black_box([round as u8; 8 << 10]);
                assert_eq!(WORDS.get(), [round + i as u64; 32]);
                assert_eq!(TEXT.with_borrow(String::clone), format!("{round} {i}"));
            });
            handles.into_iter().for_each(joined);
        }
    });
}

#[test]
fn scoped_and_main_goroutines_too() {
    CELL.set(3);
    on_goroutines(|| {
        CELL.set(1);
        let mut sums = [0; 64];
        trefoil::scope(|s| {
            for (i, sum) in sums.iter_mut().enumerate() {
                s.go(move || {
                    assert_eq!(CELL.replace(i), 0);
                    yields(3);
                    *sum = CELL.get();
                });
            }
        });
        assert_eq!(sums, std::array::from_fn(|i| i));
        assert_eq!(CELL.get(), 1);
    });
    assert_eq!(CELL.take(), 3);
}

// ---- destructors -------------------------------------------------------------------------------

/// Where a goroutine's destructors write what they did.
type Diary = Arc<[AtomicU32]>;

struct First(usize, Diary);
struct Second(usize, Diary);
struct Late(Diary, usize);

thread_local! {
    static FIRST: RefCell<Option<First>> = const { RefCell::new(None) };
    static SECOND: RefCell<Option<Second>> = const { RefCell::new(None) };
    static LATE: RefCell<Option<Late>> = RefCell::default();
    static OWNER: Cell<usize> = const { Cell::new(usize::MAX) };
}

impl First {
    /// What each kind of goroutine does in its destructor; every kind comes back as itself.
    fn act(&self) {
        match self.0 % 6 {
            0 => yields(3),
            1 => assert_eq!(go(|| 5).join().ok(), Some(5)),
            2 => {
                let diary = self.1.clone();
                let me = self.0;
                // Outlives us; it is somebody else, with thread-locals of its own.
                drop(go(move || {
                    assert_eq!(OWNER.get(), usize::MAX);
                    diary[me].fetch_add(100, SeqCst);
                }));
            }
            3 => assert_eq!(thread::spawn(|| 6).join().ok(), Some(6)),
            4 => {
                // Destroyed before us or not: either way no panic, and never another's.
                let seen = SECOND.try_with(|s| s.borrow().as_ref().map(|s| s.0));
                assert!(matches!(seen, Err(_) | Ok(None)) || seen == Ok(Some(self.0)));
            }
            _ => {
                // Born in a destructor: must be destroyed as well, after another park.
                let late = Late(self.1.clone(), self.0);
                let _ = LATE.try_with(|l| l.replace(Some(late)));
                joined(go(|| yields(2)));
            }
        }
    }
}

impl Drop for First {
    fn drop(&mut self) {
        let ok = catch_unwind(AssertUnwindSafe(|| self.act())).is_ok();
        let same = OWNER.get() == self.0 && !thread::panicking();
        self.1[self.0].fetch_add(if ok && same { 1 } else { 10_000 }, SeqCst);
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        yield_now();
        let same = OWNER.get() == self.0;
        self.1[self.0].fetch_add(if same { 10 } else { 10_000 }, SeqCst);
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        yields(2);
        let same = OWNER.get() == self.1;
        self.0[self.1].fetch_add(if same { 1000 } else { 10_000 }, SeqCst);
    }
}

#[test]
fn destructors_may_do_what_code_does() {
    const N: usize = 3000;
    on_goroutines(|| {
        let diary: Diary = counters(N);
        let d = diary.clone();
        let handles = crowd(N, move |i| {
            assert_eq!(OWNER.replace(i), usize::MAX);
            // Destructors run in the reverse order of first use: both orders.
            if i % 2 == 0 {
                FIRST.set(Some(First(i, d.clone())));
                SECOND.set(Some(Second(i, d.clone())));
            } else {
                SECOND.set(Some(Second(i, d.clone())));
                FIRST.set(Some(First(i, d.clone())));
            }
            yield_now();
        });
        for (i, handle) in handles.into_iter().enumerate() {
            joined(handle);
            let wrote = diary[i].load(SeqCst);
            match i % 6 {
                2 => assert!(wrote == 11 || wrote == 111, "goroutine {i} wrote {wrote}"),
                5 => assert_eq!(wrote, 1011, "goroutine {i}: first, second and late, once each"),
                _ => assert_eq!(wrote, 11, "goroutine {i}: first and second, once each"),
            }
        }
        while (2..N).step_by(6).any(|i| diary[i].load(SeqCst) != 111) {
            yield_now();
        }
    });
}

#[test]
fn destructors_run_after_a_panic_and_without_a_join() {
    const N: usize = 1000;
    on_goroutines(|| {
        let drops = counters(N);
        let d = drops.clone();
        let handles = crowd(N, move |i| {
            CELL.set(i + 1);
            CONST_DROP.set(Some(Dropped { owner: i, drops: d.clone() }));
            yield_now();
            if i % 3 == 0 {
                panic!("{EXPECTED} {i}");
            }
        });
        for (i, handle) in handles.into_iter().enumerate() {
            match i % 3 {
                0 => {
                    let payload = handle.join().unwrap_err();
                    assert_eq!(text(&*payload), format!("{EXPECTED} {i}"));
                    assert_eq!(drops[i].load(SeqCst), 1);
                }
                1 => {
                    joined(handle);
                    assert_eq!(drops[i].load(SeqCst), 1);
                }
                _ => drop(handle),
            }
        }
        while drops.iter().any(|d| d.load(SeqCst) == 0) {
            yield_now();
        }
        yields(100);
        assert!(drops.iter().all(|d| d.load(SeqCst) == 1));
    });
}

// ---- crates ------------------------------------------------------------------------------------

#[test]
fn ten_thousand_hold_a_thread_rng() {
    on_goroutines(|| {
        let gate = Gate::new(MANY);
        let handles = crowd(MANY, move |_| {
            // An Rc to this goroutine's generator: two threads on one would be a data race.
            let mut rng = rand::rng();
            let mut drawn = [0; 6];
            gate.pass();
            for value in &mut drawn {
                *value = rng.next_u64();
                let (low, high) = (rng.random_range(0..10), rng.random_range(10..20));
                yield_now();
                assert!(low < 10 && (10..20).contains(&high));
            }
            drawn
        });
        let drawn: HashSet<u64> = handles.into_iter().flat_map(joined).collect();
        assert_eq!(drawn.len(), 6 * MANY, "a value was drawn twice: a shared generator");
    });
}

mod spans {
    //! A `tracing` layer that checks, at every event, that the current span is the event's owner's.

    use std::fmt::Debug;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id};
    use tracing::{Event, Subscriber};
    use tracing_subscriber::Layer;
    use tracing_subscriber::layer::Context;
    use tracing_subscriber::registry::LookupSpan;

    pub(super) static RIGHT: AtomicUsize = AtomicUsize::new(0);
    pub(super) static WRONG: AtomicUsize = AtomicUsize::new(0);

    pub(super) struct Check;

    #[derive(Default)]
    struct Owner(Option<u64>);

    impl Visit for Owner {
        fn record_u64(&mut self, field: &Field, value: u64) {
            if field.name() == "owner" {
                self.0 = Some(value);
            }
        }

        fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
    }

    impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Check {
        fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
            let mut owner = Owner::default();
            attributes.record(&mut owner);
            if let Some(span) = context.span(id) {
                span.extensions_mut().insert(owner);
            }
        }

        fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
            let mut owner = Owner::default();
            event.record(&mut owner);
            let current = context.lookup_current();
            let its = current.and_then(|s| s.extensions().get::<Owner>().and_then(|o| o.0));
            let right = owner.0.is_some() && owner.0 == its;
            if right { &RIGHT } else { &WRONG }.fetch_add(1, SeqCst);
        }
    }
}

#[test]
fn ten_thousand_stay_in_their_spans() {
    use tracing::{Dispatch, dispatcher, info, info_span};
    use tracing_subscriber::layer::SubscriberExt;
    // The registry gives up at 4,096 threads at a time; waves also reuse its slots.
    const WAVE: usize = 1000;
    on_goroutines(|| {
        let dispatch = Dispatch::new(tracing_subscriber::registry().with(spans::Check));
        for _ in 0..MANY / WAVE {
            let gate = Gate::new(WAVE);
            let dispatch = dispatch.clone();
            let handles = crowd(WAVE, move |i| {
                let owner = i as u64;
                let _default = dispatcher::set_default(&dispatch);
                assert!(tracing::Span::current().is_none(), "a span is entered already");
                let outer = info_span!("outer", owner);
                let entered = outer.enter();
                gate.pass();
                info!(owner, "in outer");
                {
                    let inner = info_span!("inner", owner).entered();
                    yields(2);
                    assert_eq!(tracing::Span::current().id(), inner.id());
                    info!(owner, "in inner");
                }
                yield_now();
                assert_eq!(tracing::Span::current().id(), outer.id());
                info!(owner, "in outer again");
                drop(entered);
                yield_now();
                assert!(tracing::Span::current().is_none());
            });
            handles.into_iter().for_each(joined);
        }
    });
    assert_eq!(spans::WRONG.load(SeqCst), 0, "events in another goroutine's span");
    assert_eq!(spans::RIGHT.load(SeqCst), 3 * MANY);
}

// ---- panics ------------------------------------------------------------------------------------

/// Parks and yields while its goroutine unwinds.
struct ParksWhileUnwinding(Arc<AtomicUsize>);

impl Drop for ParksWhileUnwinding {
    fn drop(&mut self) {
        let before = thread::panicking();
        // Another goroutine, quite possibly on this very thread, does not panic.
        let other = go(|| {
            yields(2);
            thread::panicking()
        });
        yield_now();
        let other = other.join().unwrap_or(true);
        if before && thread::panicking() && !other {
            self.0.fetch_add(1, SeqCst);
        }
    }
}

#[test]
fn panics_unwind_across_yields_and_parks() {
    const N: usize = 2000;
    on_goroutines(|| {
        let parked = Arc::new(AtomicUsize::new(0));
        let p = parked.clone();
        let handles = crowd(N, move |i| {
            for k in 0..3 {
                let caught = catch_unwind(AssertUnwindSafe(|| {
                    yield_now();
                    let _guard = ParksWhileUnwinding(p.clone());
                    if i % 2 == 0 {
                        panic!("{EXPECTED} {i} {k}");
                    }
                    std::mem::forget(_guard);
                    yield_now();
                    i
                }));
                assert!(!thread::panicking());
                yield_now();
                assert!(!thread::panicking());
                match caught {
                    Ok(value) => assert!(i % 2 == 1 && value == i),
                    Err(e) => assert_eq!(text(&*e), format!("{EXPECTED} {i} {k}")),
                }
            }
            // The last one is not caught here.
            let _guard = ParksWhileUnwinding(p.clone());
            panic!("{EXPECTED} {i} end");
        });
        for (i, handle) in handles.into_iter().enumerate() {
            let payload = handle.join().unwrap_err();
            assert_eq!(text(&*payload), format!("{EXPECTED} {i} end"));
        }
        assert_eq!(parked.load(SeqCst), N / 2 * 3 + N);
        assert!(!thread::panicking());
    });
}

#[test]
fn a_panic_inside_a_destructor_while_unwinding_is_caught_there() {
    struct Nested;
    impl Drop for Nested {
        fn drop(&mut self) {
            assert!(thread::panicking());
            let inner = catch_unwind(|| {
                yield_now();
                panic!("{EXPECTED} inner")
            });
            yield_now();
            assert_eq!(text(&*inner.unwrap_err()), "expected inner");
            assert!(thread::panicking());
        }
    }
    on_goroutines(|| {
        let handles = crowd(500, |i| {
            let _nested = Nested;
            yield_now();
            panic!("{EXPECTED} outer {i}");
        });
        for (i, handle) in handles.into_iter().enumerate() {
            let payload = handle.join().map(|never: ()| never).unwrap_err();
            assert_eq!(text(&*payload), format!("expected outer {i}"));
        }
    });
}

#[test]
fn a_backtrace_ends_at_the_goroutines_entry() {
    #[inline(never)]
    fn named_frame(depth: usize) -> String {
        if depth > 0 {
            let trace = named_frame(black_box(depth - 1));
            return black_box(trace);
        }
        yield_now();
        Backtrace::force_capture().to_string()
    }
    let trace = on_goroutines(|| {
        let traces: Vec<String> = crowd(20, |_| named_frame(3)).into_iter().map(joined).collect();
        traces.into_iter().next_back().unwrap()
    });
    assert_eq!(trace.matches("named_frame").count(), 4, "{trace}");
    assert!(trace.contains("a_backtrace_ends_at_the_goroutines_entry"), "{trace}");
    // The thread's own frames are under the goroutine's only for a debugger that lost its way.
    for foreign in ["start_thread", "clone3", "thread_loop", "thread_main", "lang_start"] {
        assert!(!trace.contains(foreign), "{foreign} in\n{trace}");
    }
    let frames: Vec<&str> = trace.lines().filter(|l| !l.trim_start().starts_with("at ")).collect();
    assert!(frames.len() < 60, "{trace}");
    let last = frames.last().copied().unwrap_or("");
    assert!(
        last.contains("trefoil") || last.contains("goroutine"),
        "last frame {last} of\n{trace}"
    );
}

// ---- the rest of std ---------------------------------------------------------------------------

#[test]
fn threads_and_processes_from_inside() {
    on_goroutines(|| {
        let busy = Arc::new(AtomicBool::new(true));
        let others: Vec<_> = (0..8)
            .map(|i| {
                let busy = busy.clone();
                go(move || {
                    CELL.set(i + 1);
                    while busy.load(SeqCst) {
                        yield_now();
                        assert_eq!(CELL.get(), i + 1);
                    }
                })
            })
            .collect();
        let handles = crowd(60, |i| {
            CELL.set(i + 100);
            let me = thread::current().id();
            for _ in 0..3 {
                yield_now();
                let thread = thread::spawn(move || {
                    assert_eq!(CELL.replace(7), 0, "a plain thread sees a goroutine's value");
                    assert_eq!(trefoil::id(), 0);
                    // A goroutine of the default runtime, started and joined by a plain thread.
                    let inner = joined(go(|| CELL.replace(9)));
                    (thread::current().id(), CELL.get(), inner)
                });
                let (id, seven, inner) = thread.join().unwrap();
                assert_ne!(id, me);
                assert_eq!((seven, inner), (7, 0));
                assert_eq!(CELL.get(), i + 100);
            }
            if i % 6 == 0 {
                let out = Command::new("echo").arg(i.to_string()).output().unwrap();
                assert!(out.status.success());
                assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), i.to_string());
                let status = Command::new("false").status().unwrap();
                assert_eq!(status.code(), Some(1));
                let missing = Command::new("/no/such/program").status().unwrap_err();
                assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
            }
            thread::scope(|s| {
                let x = s.spawn(|| i + 1);
                assert_eq!(x.join().unwrap(), i + 1);
            });
            assert_eq!(thread::current().id(), me);
        });
        handles.into_iter().for_each(joined);
        busy.store(false, SeqCst);
        others.into_iter().for_each(joined);
    });
}

#[test]
fn an_unpark_is_the_goroutines_own() {
    on_goroutines(|| {
        let handles = crowd(500, |_| {
            for _ in 0..5 {
                let me = thread::current();
                me.unpark();
                yields(2);
                // Hangs if the token stayed with the thread.
                thread::park();
            }
            // And a token that is not used goes with its goroutine.
            thread::current().unpark();
        });
        handles.into_iter().for_each(joined);
        let timeout = Duration::from_millis(1);
        let start = std::time::Instant::now();
        joined(go(move || thread::park_timeout(timeout)));
        assert!(start.elapsed() >= timeout, "a fresh goroutine found a token");
    });
}

#[test]
fn malloc_moves_with_the_goroutine() {
    on_goroutines(|| {
        let handles = crowd(1000, |i| {
            let mut rng = rand::rng();
            let mut kept: Vec<(u8, Vec<u8>)> = Vec::new();
            for step in 0..60 {
                let size = match rng.random_range(0..20) {
                    0 => rng.random_range(0..200_000),
                    1..5 => rng.random_range(0..8_000),
                    _ => rng.random_range(0..400),
                };
                let byte = (i + step) as u8;
                kept.push((byte, vec![byte; size]));
                if kept.len() > 12 {
                    let (byte, bytes) = kept.swap_remove(rng.random_range(0..kept.len()));
                    assert!(bytes.iter().all(|&b| b == byte), "memory changed hands");
                }
                if step % 4 == 0 {
                    yield_now();
                }
            }
            kept
        });
        for handle in handles {
            // Freed on a goroutine that did not allocate it.
            for (byte, bytes) in joined(handle) {
                assert!(bytes.iter().all(|&b| b == byte), "memory changed hands");
            }
        }
    });
}

#[test]
fn strings_maps_and_reference_counts() {
    on_goroutines(|| {
        let handles = crowd(1000, |i| {
            let words = Rc::new(RefCell::new(HashMap::new()));
            let same = words.clone();
            let mut sorted = BTreeMap::new();
            for k in 0..40 {
                let word = format!("{:>4}-{}", (k * 7919 + i) % 100, k % 9);
                *same.borrow_mut().entry(word.clone()).or_insert(0) += k;
                *sorted.entry(word).or_insert(0) += k;
                if k % 10 == 0 {
                    let held = words.borrow();
                    yield_now();
                    drop(held);
                }
            }
            let mut list: Vec<_> = words.borrow().iter().map(|(w, n)| (w.clone(), *n)).collect();
            list.sort();
            assert_eq!(Rc::strong_count(&words), 2);
            assert_eq!(list, sorted.into_iter().collect::<Vec<_>>());
            let numbers: String = list.iter().map(|(w, n)| format!("{w}={n};")).collect();
            yield_now();
            let sum: usize = numbers
                .split(';')
                .filter_map(|part| part.split_once('='))
                .map(|(_, n)| n.parse::<usize>().unwrap())
                .sum();
            assert_eq!(sum, 780);
            assert_eq!(format!("{:?}", "é\n".repeat(3)).to_uppercase().len(), 14);
        });
        handles.into_iter().for_each(joined);
    });
}

// ---- the other way to make blocks --------------------------------------------------------------

/// The whole suite once more with TLS blocks by `pthread_create`, as where the template is not trusted.
#[test]
fn all_of_it_on_the_fallback() {
    if std::env::var_os("TREFOIL_DEBUG").is_some() {
        println!("skipped: TREFOIL_DEBUG is set already");
        return;
    }
    let _watchdog = watchdog();
    let out = Command::new(std::env::current_exe().unwrap())
        .env("TREFOIL_DEBUG", "tls=pthread")
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}\n{}\n{}",
        out.status,
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
}
