//! Samples for profiles: what a goroutine did at one moment, with a copy of its stack.
//!
//! A sample is taken where nothing may be allocated and no lock may be taken: in a signal handler
//! (CPU time), or inside the runtime (waits). So it is not unwound there. It contains the registers
//! and **the bytes of the stack**, and `observe/profile/` unwinds them later, on a thread of its
//! own. A handler copies 1 to 3 KiB from an ordinary goroutine, in less than a microsecond. It
//! calls no code of others, so it does not matter what it has interrupted: malloc, the loader in
//! the middle of a `dlopen`, the runtime, the vdso.
//!
//! | kind | taken | value |
//! |---|---|---|
//! | `Cpu` | by a timer on the CPU clock of each M | periods of CPU time |
//! | `Wait` | by a goroutine that has waited | nanoseconds that it waited |
//! | `Unlock` | by a goroutine that wakes one which waits for a lock | nanoseconds that that one waited |
//! | `Waker` | by a goroutine that wakes one which has waited for long, while a flight recorder is on | which one was woken |
//!
//! # The ring
//! One ring of words for the process. A writer reserves room by a compare-and-swap on `head`,
//! writes its words, and then the first one, which is not zero: the sample is complete. The reader
//! takes complete samples in order, writes zeros over them, and moves `tail`. If there is no room,
//! the sample is lost, and counted. The memory stays mapped for ever: a late signal may still
//! write.
//!
//! # CPU timers
//! Each M has a timer while a CPU profile runs (`timer_create` with `SIGEV_THREAD_ID`): a timer of
//! the process would interrupt any thread that happens to run. [`attach`] and [`detach`] give and
//! take the timers of Ms that start and end meanwhile.
//!
//! Rejected: to unwind in the handler. The unwind tables have to be replaced at a `dlopen`, those
//! of a closed library must not be read any more, and the cache of the unwinder would need a lock.
//! Frame pointers: rustc omits them by default.

use crate::arch::{self, Registers};
use crate::mem;
use crate::sched::g::G;
use crate::sched::labels::LabelRef;
use crate::sched::m::{M, Rt};
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::{Nanos, now};
use crate::sys::lock::Lock;
use crate::sys::raw::syscall;
use crate::sys::signal;
use crate::sys::syscalls;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::io;
use std::num::NonZeroU16;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

/// The signal of the CPU timers. Go's and everyone's.
pub(crate) const CPU_SIGNAL: c_int = libc::SIGPROF;

/// Words of the ring: 8 MiB of address space, of which only what is touched takes memory.
const RING_WORDS: u64 = 1 << 20;
/// Words of a stack that are copied at most. Frames further out are missing in the profile.
const STACK_WORDS_MAX: usize = 8 << 10;
/// Words before the stack.
const HEAD_WORDS: usize = 13;
/// Bytes of an M's own stack above the frame of [`attach`] that are copied too.
const OUTER_BYTES: usize = 1024;
/// Bytes below the frame of `M::on_own_context` that are copied too: the frame of the call.
const CALL_FRAME_BYTES: usize = 512;

/// What a sample is about; see the head of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum SampleKind {
    Cpu,
    Wait,
    Unlock,
    Waker,
}

impl SampleKind {
    pub(crate) const COUNT: usize = 4;

    fn from_u8(n: u8) -> SampleKind {
        match n {
            0 => SampleKind::Cpu,
            1 => SampleKind::Wait,
            2 => SampleKind::Unlock,
            _ => SampleKind::Waker,
        }
    }
}

/// A sample, as the reader gets it.
pub(crate) struct Sample {
    pub(crate) kind: SampleKind,
    /// For a CPU sample: the number of the profile that it belongs to.
    pub(crate) session: u8,
    pub(crate) value: u64,
    /// For a wait: the rate at which waits were sampled. For a waker: when it woke the other one, since
    /// the recording began.
    pub(crate) nanos: Nanos,
    pub(crate) reason: WaitReason,
    /// The id of the goroutine or task; 0 if none ran.
    pub(crate) id: u64,
    pub(crate) labels: Option<LabelRef>,
    pub(crate) registers: Registers,
    /// Whether the stack was longer than what is copied of it.
    pub(crate) is_cut: bool,
    /// Contents of the stack: the address of the first word, and the words. There is a second part
    /// if a goroutine has called the allocator on the M's own stack.
    pub(crate) stack: [(u64, Vec<u64>); 2],
}

/// A part of a stack, to be copied.
#[derive(Clone, Copy, Default)]
struct StackPart {
    start: usize,
    words: usize,
}

impl StackPart {
    /// Returns the words from `start` to `end`, at most `max`.
    fn new(start: usize, end: usize, max: usize) -> StackPart {
        let start = start.next_multiple_of(8);
        StackPart { start, words: (end.saturating_sub(start) / 8).min(max) }
    }
}

/// See the head of the file.
struct Ring {
    /// Null until the first profile or recording.
    words: AtomicPtr<AtomicU64>,
    /// Where the next sample is written. Counts words, and never wraps around.
    head: AtomicU64,
    /// Where the oldest sample is.
    tail: AtomicU64,
    /// The values of samples that found no room, by kind.
    lost: [AtomicU64; SampleKind::COUNT],
}

static RING: Ring = Ring {
    words: AtomicPtr::new(null_mut()),
    head: AtomicU64::new(0),
    tail: AtomicU64::new(0),
    lost: [const { AtomicU64::new(0) }; SampleKind::COUNT],
};

impl Ring {
    /// Maps the memory, once.
    fn map(&self) -> io::Result<()> {
        if !self.words.load(Ordering::Acquire).is_null() {
            return Ok(());
        }
        let bytes = RING_WORDS as usize * 8;
        let (prot, flags) = (syscalls::READ_WRITE, libc::MAP_NORESERVE);
        // SAFETY: a new mapping, anywhere.
        let memory = unsafe { syscalls::mmap_anonymous(null_mut(), bytes, prot, flags) }?;
        let (old, new) = (Ordering::AcqRel, Ordering::Acquire);
        if self.words.compare_exchange(null_mut(), memory.cast(), old, new).is_err() {
            // SAFETY: another thread was faster, and no thread knows this mapping.
            let _ = unsafe { syscalls::munmap(memory, bytes) };
        }
        Ok(())
    }

    /// Returns a word, or None if no memory is mapped.
    #[inline(always)]
    fn word(&self, at: u64) -> Option<&'static AtomicU64> {
        let words = self.words.load(Ordering::Acquire);
        if words.is_null() {
            return None;
        }
        // SAFETY: inside the mapping, which is never unmapped.
        Some(unsafe { &*words.add((at % RING_WORDS) as usize) })
    }

    /// Reserves room for `len` words, if not more than `max` are used then. Async-signal-safe.
    fn reserve(&self, len: u64, max: u64) -> Option<u64> {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // Acquire: the reader's zeros are written before the words of this sample.
            let tail = self.tail.load(Ordering::Acquire);
            // If `head` is out of date, `tail` may be above it; then the exchange fails.
            if head.saturating_add(len).saturating_sub(tail) > max {
                return None;
            }
            let next = head + len;
            match self.head.compare_exchange_weak(head, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Some(head),
                Err(now) => head = now,
            }
        }
    }

    fn set(&self, at: u64, value: u64) {
        if let Some(word) = self.word(at) {
            word.store(value, Ordering::Relaxed);
        }
    }

    fn get(&self, at: u64) -> u64 {
        self.word(at).map_or(0, |word| word.load(Ordering::Relaxed))
    }
}

/// The first word of a sample: bits 0–31 its length in words, 32–39 kind, 40–47 reason, 48–55
/// session, bit 62 [`CUT`], bit 63 [`COMPLETE`].
const COMPLETE: u64 = 1 << 63;
const CUT: u64 = 1 << 62;

/// What a sample is about, without its stack.
struct Event {
    kind: SampleKind,
    session: u8,
    reason: u8,
    value: u64,
    /// See [`Sample::nanos`].
    nanos: Nanos,
}

/// Writes a sample. `labels` is called only if there is room. Async-signal-safe.
///
/// # Safety
/// The parts of the stack can be read, and do not change meanwhile.
unsafe fn write(
    event: &Event,
    id: u64,
    registers: Registers,
    stack: [StackPart; 2],
    is_cut: bool,
    labels: impl FnOnce() -> Option<LabelRef>,
) {
    let len = HEAD_WORDS + stack[0].words + stack[1].words;
    // Where many wakers were is worth less than a profile.
    let max = if event.kind == SampleKind::Waker { RING_WORDS / 2 } else { RING_WORDS };
    let Some(start) = RING.reserve(len as u64, max) else {
        // Not read for wakers, whose values cannot be added.
        RING.lost[event.kind as usize].fetch_add(event.value, Ordering::Relaxed);
        return;
    };
    let head = [
        event.value,
        id,
        labels().map_or(0, LabelRef::into_word),
        registers.pc,
        registers.sp,
        registers.fp,
        registers.lr,
        registers.rbx,
        stack[0].start as u64,
        stack[1].start as u64,
        stack[0].words as u64 | (stack[1].words as u64) << 32,
        event.nanos,
    ];
    let mut at = start + 1;
    for word in head {
        RING.set(at, word);
        at += 1;
    }
    for part in stack {
        let source = std::ptr::with_exposed_provenance::<u64>(part.start);
        for i in 0..part.words {
            // SAFETY: the caller's contract.
            RING.set(at, unsafe { source.add(i).read_volatile() });
            at += 1;
        }
    }
    let first = len as u64
        | u64::from(event.kind as u8) << 32
        | u64::from(event.reason) << 40
        | u64::from(event.session) << 48
        | if is_cut { CUT } else { 0 }
        | COMPLETE;
    if let Some(word) = RING.word(start) {
        // Release: pairs with the Acquire in `take`.
        word.store(first, Ordering::Release);
    }
}

/// Takes the oldest complete sample. Only one thread may call it at a time.
pub(crate) fn take() -> Option<Sample> {
    let tail = RING.tail.load(Ordering::Relaxed);
    let first = RING.word(tail)?.load(Ordering::Acquire);
    if first & COMPLETE == 0 {
        return None;
    }
    let len = first & u64::from(u32::MAX);
    let head = |i: u64| RING.get(tail + i);
    let words = [head(11) & u64::from(u32::MAX), head(11) >> 32];
    let second = HEAD_WORDS as u64 + words[0];
    let part = |from: u64, words: u64| (from..from + words).map(head).collect::<Vec<u64>>();
    let sample = Sample {
        kind: SampleKind::from_u8((first >> 32) as u8),
        reason: WaitReason::from_u8((first >> 40) as u8),
        session: (first >> 48) as u8,
        is_cut: first & CUT != 0,
        value: head(1),
        nanos: head(12),
        id: head(2),
        // SAFETY: the writer stored it, and the word is taken from the ring once.
        labels: unsafe { LabelRef::from_word(head(3)) },
        registers: Registers { pc: head(4), sp: head(5), fp: head(6), lr: head(7), rbx: head(8) },
        stack: [(head(9), part(HEAD_WORDS as u64, words[0])), (head(10), part(second, words[1]))],
    };
    (tail..tail + len).for_each(|at| RING.set(at, 0));
    // Release: pairs with the Acquire in `reserve`.
    RING.tail.store(tail + len, Ordering::Release);
    Some(sample)
}

/// Returns where the next sample will be written: the number of words so far.
pub(crate) fn written() -> u64 {
    RING.head.load(Ordering::Acquire)
}

/// Returns how many words of samples were taken.
pub(crate) fn taken() -> u64 {
    RING.tail.load(Ordering::Relaxed)
}

/// Returns the sum of the values of samples of this kind that found no room in the ring, since the
/// process began.
pub(crate) fn lost(kind: SampleKind) -> u64 {
    RING.lost[kind as usize].load(Ordering::Relaxed)
}

/// Returns the memory of the ring to the kernel, if it is empty. The caller has ended all sampling.
pub(crate) fn trim() {
    let words = RING.words.load(Ordering::Acquire);
    // A writer that comes later sees that sampling has ended.
    if !words.is_null() && WRITERS.load(Ordering::SeqCst) == 0 && written() == taken() {
        // SAFETY: the ring's mapping; all words in it are zero, and stay so.
        let _ = unsafe {
            syscalls::madvise(words.cast(), RING_WORDS as usize * 8, libc::MADV_DONTNEED)
        };
    }
}

/// How many threads are about to write samples.
static WRITERS: AtomicU32 = AtomicU32::new(0);

/// Counts a thread in [`WRITERS`]. It is made before the check whether samples are taken.
struct Writer;

impl Writer {
    fn new() -> Writer {
        WRITERS.fetch_add(1, Ordering::SeqCst);
        Writer
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        WRITERS.fetch_sub(1, Ordering::SeqCst);
    }
}

// CPU time.

/// What an M has for CPU profiles. Guarded by [`TIMERS`], except `own_stack` and
/// `own_context_from`, which belong to its thread.
pub(crate) struct MSample {
    /// The next M in the list of [`TIMERS`].
    next: Cell<Option<&'static M>>,
    /// The kernel's number of its timer.
    timer: Cell<Option<c_int>>,
    /// The upper end of the thread's own stack.
    own_stack: Cell<usize>,
    /// While a goroutine has called `M::on_own_context`: an address in the frame of that function.
    pub(crate) own_context_from: Cell<usize>,
}

impl MSample {
    pub(crate) const fn new() -> MSample {
        MSample {
            next: Cell::new(None),
            timer: Cell::new(None),
            own_stack: Cell::new(0),
            own_context_from: Cell::new(0),
        }
    }
}

/// The Ms that can have a timer, and the period of the timers.
struct Timers {
    first: Option<&'static M>,
    /// None while no CPU profile runs.
    period: Option<Nanos>,
}

// SAFETY: the lock guards the list.
unsafe impl Send for Timers {}

static TIMERS: Lock<Timers> = Lock::new(Timers { first: None, period: None });

/// The number of the CPU profile that runs; 0 if none runs.
static SESSION: AtomicU8 = AtomicU8::new(0);

/// Called on an M's thread when it can run goroutines. Does not allocate.
pub(crate) fn attach(m: &'static M) {
    let here = 0u8;
    // The frames that called this are above; glibc's record of the thread is above those.
    m.sample.own_stack.set(&raw const here as usize + OUTER_BYTES);
    let mut timers = TIMERS.lock();
    m.sample.next.set(timers.first);
    timers.first = Some(m);
    if let Some(period) = timers.period {
        // Without a timer the profile lacks the time of this M, as if its samples were lost.
        m.sample.timer.set(start_timer(m, period).ok());
    }
}

/// Called on an M's thread when it will run no more goroutines.
pub(crate) fn detach(m: &'static M) {
    let mut timers = TIMERS.lock();
    if let Some(timer) = m.sample.timer.take() {
        delete_timer(timer);
    }
    let next = m.sample.next.take();
    if timers.first.is_some_and(|first| std::ptr::eq(first, m)) {
        timers.first = next;
        return;
    }
    let mut before = timers.first;
    while let Some(other) = before {
        if other.sample.next.get().is_some_and(|behind| std::ptr::eq(behind, m)) {
            other.sample.next.set(next);
            return;
        }
        before = other.sample.next.get();
    }
}

/// Why the CPU timers could not be started.
pub(crate) enum TimerError {
    /// The Ms block the signal.
    SignalBlocked,
    Kernel(io::Error),
}

/// Returns the number of a new CPU profile, which is not 0.
pub(crate) fn next_session() -> u8 {
    static SESSIONS: AtomicU32 = AtomicU32::new(0);
    (SESSIONS.fetch_add(1, Ordering::Relaxed) % 255) as u8 + 1
}

/// Starts the timers of all Ms. The handler is installed.
pub(crate) fn start_timers(session: u8, period: Nanos) -> Result<(), TimerError> {
    RING.map().map_err(TimerError::Kernel)?;
    SESSION.store(session, Ordering::SeqCst);
    let mut timers = TIMERS.lock();
    timers.period = Some(period);
    let mut next = timers.first;
    let mut result = Ok(());
    while let Some(m) = next {
        if m.signal_mask.get() & signal::bit(CPU_SIGNAL) != 0 {
            result = Err(TimerError::SignalBlocked);
            break;
        }
        match start_timer(m, period) {
            Ok(timer) => m.sample.timer.set(Some(timer)),
            Err(e) => {
                result = Err(TimerError::Kernel(e));
                break;
            }
        }
        next = m.sample.next.get();
    }
    drop(timers);
    if result.is_err() {
        stop_timers();
    }
    result
}

/// Ends the timers of all Ms. A signal that is on its way may still arrive.
pub(crate) fn stop_timers() {
    let mut timers = TIMERS.lock();
    timers.period = None;
    let mut next = timers.first;
    while let Some(m) = next {
        if let Some(timer) = m.sample.timer.take() {
            delete_timer(timer);
        }
        next = m.sample.next.get();
    }
    SESSION.store(0, Ordering::SeqCst);
}

/// The kernel's `sigevent` for `SIGEV_THREAD_ID`.
#[repr(C)]
struct TimerEvent {
    value: *const u8,
    signal: c_int,
    notify: c_int,
    tid: c_int,
    unused: [c_int; 11],
}

/// The address of this byte is the value of the CPU timers' signals.
static TIMER_COOKIE: u8 = 0;

/// Starts a timer on the CPU clock of the thread of `m`.
fn start_timer(m: &M, period: Nanos) -> io::Result<c_int> {
    let tid = m.tid.load(Ordering::Relaxed) as c_int;
    // The kernel's number for the CPU clock of a thread.
    let clock = (!tid << 3) | 0b110;
    let event = TimerEvent {
        value: &raw const TIMER_COOKIE,
        signal: CPU_SIGNAL,
        notify: libc::SIGEV_THREAD_ID,
        tid,
        unused: [0; 11],
    };
    let mut timer: c_int = 0;
    let time = |nanos: Nanos| libc::timespec {
        tv_sec: (nanos / 1_000_000_000) as i64,
        tv_nsec: (nanos % 1_000_000_000) as i64,
    };
    // The first period ends at a random time. Otherwise threads that run less than a period would
    // never be counted, and threads that started together would be interrupted together.
    let first = 1 + scramble(now() ^ (tid as u64) << 40) % period;
    let times = libc::itimerspec { it_interval: time(period), it_value: time(first) };
    // SAFETY: the kernel reads `event` and `times`, and writes `timer`.
    unsafe {
        let (event, at) = (&raw const event as usize, &raw mut timer as usize);
        check(syscall(libc::SYS_timer_create, [clock as isize as usize, event, at]))?;
        let set = [timer as usize, 0, &raw const times as usize, 0];
        check(syscall(libc::SYS_timer_settime, set)).inspect_err(|_| delete_timer(timer))?;
    }
    Ok(timer)
}

fn delete_timer(timer: c_int) {
    // SAFETY: one of our timers, deleted once.
    unsafe { syscall(libc::SYS_timer_delete, [timer as usize]) };
}

fn check(result: isize) -> io::Result<()> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result as i32)) } else { Ok(()) }
}

/// Returns a number that depends on all bits of `n` (SplitMix64's finalizer).
fn scramble(mut n: u64) -> u64 {
    n = (n ^ n >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n = (n ^ n >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ n >> 31
}

/// The `siginfo_t` of a timer's signal.
#[repr(C)]
struct TimerSiginfo {
    signal: i32,
    error: i32,
    code: i32,
    padding: i32,
    timer: i32,
    /// Periods that have passed besides the one that the signal is for.
    overrun: i32,
    value: *const u8,
}

/// Handles the signal of a CPU timer. Async-signal-safe: uses no thread-locals, no errno, no locks.
pub(crate) unsafe extern "C" fn on_cpu_signal(
    _: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    // SAFETY: the kernel's pointers.
    let (info, context) =
        unsafe { (&*info.cast::<TimerSiginfo>(), &*context.cast::<libc::ucontext_t>()) };
    let _writer = Writer::new();
    let session = SESSION.load(Ordering::SeqCst);
    if info.code != libc::SI_TIMER || info.value != &raw const TIMER_COOKIE || session == 0 {
        return;
    }
    // SAFETY: null, or an M; Ms are never freed.
    let Some(m) = (unsafe { arch::inherited_m::<M>().as_ref() }) else { return };
    let tid = syscalls::gettid();
    if m.tid.load(Ordering::Relaxed) != tid {
        // The thread is about to end, and another one has its M.
        return;
    }
    let event = Event {
        kind: SampleKind::Cpu,
        session,
        reason: 0,
        value: 1 + u64::try_from(info.overrun).unwrap_or(0),
        nanos: 0,
    };
    let registers = Registers::interrupted(context);
    let g = m.current.get();
    let (stack, is_cut) = stack_of(m, g, registers.sp as usize, STACK_WORDS_MAX);
    // SAFETY: the interrupted thread's own stack, from its stack pointer upwards.
    unsafe { write(&event, id_of(g), registers, stack, is_cut, || labels_of(g)) };
}

/// Returns the id of the goroutine, or of the task that it polls.
fn id_of(g: Option<&'static G>) -> u64 {
    g.map_or(0, |g| g.task_hint().map_or(g.id(), |task| task.id()))
}

/// Returns the labels of the goroutine that runs on this thread. Async-signal-safe.
fn labels_of(g: Option<&'static G>) -> Option<LabelRef> {
    let g = g?;
    match g.task_hint() {
        Some(task) => task.origin.labels_in_handler(),
        None => g.labels.read_in_handler(),
    }
}

/// What an M's own stack has at least, below where it was measured. glibc takes some of it at the
/// upper end for itself.
const OWN_STACK_BYTES: usize = crate::sched::m::THREAD_STACK_BYTES - (16 << 10);

/// Returns the parts of the stack from `sp` on, at most `max` words, and whether they are cut. There
/// are none if `sp` is on an unknown stack: that of a signal handler, or of a library with fibers.
fn stack_of(m: &M, g: Option<&'static G>, sp: usize, max: usize) -> ([StackPart; 2], bool) {
    if let Some((_, end)) = goroutine_stack(g, sp) {
        let part = StackPart::new(sp, end, max);
        return ([part, StackPart::default()], part.words == max);
    }
    let end = m.sample.own_stack.get();
    if sp >= end || end - sp > OWN_STACK_BYTES {
        return Default::default();
    }
    let own = StackPart::new(sp, end, max);
    // The goroutine whose call runs on this stack.
    let from = m.sample.own_context_from.get();
    let caller = match goroutine_stack(g, from) {
        Some((low, end)) => {
            let start = low.max(from - CALL_FRAME_BYTES);
            StackPart::new(start, end, max - own.words)
        }
        None => StackPart::default(),
    };
    ([own, caller], own.words + caller.words == max)
}

/// If `sp` is on the stack of a goroutine: returns the lower end of that stack, and where to stop
/// copying: where the stack of `g` began, or else the end of the memory.
fn goroutine_stack(g: Option<&'static G>, sp: usize) -> Option<(usize, usize)> {
    let slot = mem::slot_at(sp).filter(|slot| sp >= slot.low)?;
    let top = g.and_then(G::stack_top_hint).filter(|top| (sp..=slot.high).contains(top));
    Some((slot.low, top.unwrap_or(slot.high)))
}

// Waits.

/// Waits shorter than this are sampled with a probability; 0 if waits are not sampled.
static WAIT_RATE: AtomicU64 = AtomicU64::new(0);
/// The same for waits for locks, whose samples are taken by the goroutine that unlocks.
static UNLOCK_RATE: AtomicU64 = AtomicU64::new(0);
/// Whether one of the two is not zero. A goroutine reads it when it parks, so it has a cache line
/// to itself.
static WAITS_ON: WaitsOn = WaitsOn(AtomicBool::new(false));

#[repr(align(64))]
struct WaitsOn(AtomicBool);

fn rate_of(kind: SampleKind) -> &'static AtomicU64 {
    if kind == SampleKind::Unlock { &UNLOCK_RATE } else { &WAIT_RATE }
}

/// Sets the rate at which waits are sampled; 0 ends it.
pub(crate) fn set_wait_rate(kind: SampleKind, nanos: Nanos) -> io::Result<()> {
    RING.map()?;
    rate_of(kind).store(nanos, Ordering::SeqCst);
    let any = [&WAIT_RATE, &UNLOCK_RATE].iter().any(|rate| rate.load(Ordering::Relaxed) != 0);
    WAITS_ON.0.store(any, Ordering::Relaxed);
    Ok(())
}

pub(crate) fn wait_rate(kind: SampleKind) -> Nanos {
    rate_of(kind).load(Ordering::SeqCst)
}

/// Returns whether waits are sampled.
#[inline(always)]
pub(crate) fn are_waits_on() -> bool {
    WAITS_ON.0.load(Ordering::Relaxed)
}

/// Takes a sample of a goroutine that has waited for so long, on its stack, inside the runtime.
#[cold]
#[inline(never)]
pub(crate) fn waited(rt: Rt, g: &'static G, reason: WaitReason, nanos: Nanos) {
    // Nobody keeps a sleeper waiting.
    if reason != WaitReason::Sleep {
        sample_wait(rt, g, SampleKind::Wait, reason, nanos);
    }
}

/// Called inside the runtime by the waker of `woken`, which was parked. If `woken` waited for a
/// lock, the waker has unlocked it, and takes a sample of itself.
#[cold]
#[inline(never)]
pub(crate) fn sample_unlock(rt: Rt, woken: &G) {
    let since = woken.parked_at.load(Ordering::Relaxed);
    let reason = woken.head.reason();
    let Some(g) = rt.m().current.get() else { return };
    if UNLOCK_RATE.load(Ordering::Relaxed) != 0 && since != 0 && is_lock(reason) {
        let waited = now().saturating_sub(since);
        sample_wait(rt, g, SampleKind::Unlock, reason, waited);
    }
}

/// Returns whether a goroutine that waits for this reason waits for the owner of a lock. A futex
/// may be another thing than a lock: a condition variable, or a thread's parking place.
fn is_lock(reason: WaitReason) -> bool {
    use WaitReason::*;
    matches!(
        reason,
        MutexLock
            | RwLockRead
            | RwLockWrite
            | Semacquire
            | Once
            | Futex
            | PthreadMutex
            | PthreadRwLockRead
            | PthreadRwLockWrite
    )
}

/// Takes the sample of a wait, with a probability that is proportional to its length if it is
/// shorter than the rate.
fn sample_wait(rt: Rt, g: &'static G, kind: SampleKind, reason: WaitReason, nanos: Nanos) {
    let _writer = Writer::new();
    let rate = wait_rate(kind);
    if rate == 0 || nanos < rate && rt.random() % rate >= nanos {
        return;
    }
    let registers = Registers::here();
    let event = Event { kind, session: 0, reason: reason as u8, value: nanos, nanos: rate };
    let (stack, is_cut) = stack_of(rt.m(), Some(g), registers.sp as usize, STACK_WORDS_MAX);
    // SAFETY: this thread's own stack, from its stack pointer upwards.
    unsafe { write(&event, id_of(Some(g)), registers, stack, is_cut, || labels_of(Some(g))) };
}

// Wakers.

/// Words of the stack of a waker that are copied at most: only the program's innermost frame is
/// wanted.
const WAKER_STACK_WORDS_MAX: usize = 1024;
/// Bits of the id of the goroutine that was woken, in the value of a sample; above them is the
/// number of the recording.
const WOKEN_BITS: u32 = 48;

/// Flight recorders for which wakers are sampled.
static WAKER_RECORDINGS: AtomicU32 = AtomicU32::new(0);

/// Begins to sample wakers for one more recording. Returns its number. Only that of a recording
/// 65,535 before may be the same.
pub(crate) fn begin_wakers() -> io::Result<NonZeroU16> {
    static NUMBERS: AtomicU32 = AtomicU32::new(0);
    RING.map()?;
    WAKER_RECORDINGS.fetch_add(1, Ordering::SeqCst);
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed) % u32::from(u16::MAX);
    Ok(NonZeroU16::MIN.saturating_add(number as u16))
}

/// Ends what [`begin_wakers`] has begun.
pub(crate) fn end_wakers() {
    WAKER_RECORDINGS.fetch_sub(1, Ordering::SeqCst);
}

/// Returns whether wakers are sampled.
pub(crate) fn are_wakers_on() -> bool {
    WAKER_RECORDINGS.load(Ordering::SeqCst) != 0
}

/// Takes a sample of the goroutine that runs here and has just woken the goroutine or task `woken`,
/// `since_began` after the beginning of the recording. Inside the runtime.
pub(crate) fn sample_waker(rt: Rt, recording: NonZeroU16, woken: u64, since_began: Nanos) {
    let _writer = Writer::new();
    let Some(g) = rt.m().current.get() else { return };
    if !are_wakers_on() {
        return;
    }
    let registers = Registers::here();
    let value = u64::from(recording.get()) << WOKEN_BITS | woken & ((1 << WOKEN_BITS) - 1);
    let event = Event { kind: SampleKind::Waker, session: 0, reason: 0, value, nanos: since_began };
    let (stack, is_cut) = stack_of(rt.m(), Some(g), registers.sp as usize, WAKER_STACK_WORDS_MAX);
    // SAFETY: this thread's own stack, from its stack pointer upwards.
    unsafe { write(&event, id_of(Some(g)), registers, stack, is_cut, || None) };
}

impl Sample {
    /// Returns the number of the recording, and the id of the goroutine or task that was woken. For
    /// the sample of a waker.
    pub(crate) fn recording_and_woken(&self) -> (u16, u64) {
        ((self.value >> WOKEN_BITS) as u16, self.value & ((1 << WOKEN_BITS) - 1))
    }
}
