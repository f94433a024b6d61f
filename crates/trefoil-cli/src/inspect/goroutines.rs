//! The goroutines, tasks, threads and Ps of a process, read from outside.
//!
//! The process may run meanwhile, and its memory or its core file may be damaged. Every pointer is
//! read through [`Process`], which fails for an address that is not mapped; every list has a bound,
//! and ends where it comes back to an entry; sums of addresses wrap; a goroutine whose words do not
//! fit together is read again.

use std::collections::{HashMap, HashSet};
use std::io;

use super::layout::Layout;
use super::memory::{Cpu, Process, Registers, Thread, u32_at, u64_at};
use super::stacks::{Innermost, Trampoline, Unwinder};

/// The largest numbers of slabs, chunks of tasks, Ms and Ps that are read. A list that is longer is
/// damaged.
const SLABS_MAX: usize = 1 << 20;
const CHUNKS_MAX: usize = 1 << 20;
/// The largest number of Gs, and of blocks of tasks.
const SUBJECTS_MAX: usize = 1 << 24;
/// The largest sizes of a G or a task without its contents, and of a slab or chunk.
const SUBJECT_BYTES_MAX: u64 = 1 << 16;
const SLAB_BYTES_MAX: u64 = 64 << 20;
const MS_MAX: usize = 1 << 16;
const PS_MAX: u64 = 1 << 12;
/// How many times a goroutine that changes while it is read is read again.
const TRIES: u32 = 4;
/// Bytes of a stack that are read at once; deeper frames are read when they are needed. Most stacks
/// need one read, and a million goroutines are a million reads.
const STACK_BYTES: u64 = 2 << 10;
/// Bytes of the header of a stack.
const STACK_TOP_BYTES: usize = 64;
/// How much of that is below the word that is needed: a caller's registers are near its frame.
const STACK_BYTES_BELOW: u64 = 256;

/// What a command shows of one runtime.
pub(super) struct Runtime {
    pub(super) id: u64,
    pub(super) ps: Vec<P>,
    pub(super) ms: Vec<M>,
    pub(super) goroutines: Vec<Goroutine>,
}

pub(super) struct P {
    pub(super) id: u32,
    pub(super) status: &'static str,
    /// The M that owns it.
    pub(super) m: Option<u32>,
}

pub(super) struct M {
    address: u64,
    pub(super) id: u32,
    pub(super) thread: Thread,
    /// The goroutine that runs on it: the address of its G.
    current: u64,
    /// The P that it owns.
    pub(super) p: Option<u32>,
    sched: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Goroutine,
    Task,
}

/// A goroutine, or a task with the goroutine that polls it.
pub(super) struct Goroutine {
    pub(super) kind: Kind,
    pub(super) id: u64,
    pub(super) name: Option<String>,
    /// In Go's words.
    pub(super) state: String,
    pub(super) is_waiting: bool,
    /// How long it has waited, if it waits.
    pub(super) waited_ms: Option<u64>,
    /// Of a goroutine: the one that started it, or 0.
    pub(super) parent: u64,
    /// The function that contains its closure or future.
    pub(super) function: Option<String>,
    /// Where it was started.
    pub(super) place: Option<Place>,
    pub(super) stack: Stack,
    /// The thread that runs it.
    pub(super) thread: Option<Thread>,
    /// The number of the M that runs it.
    pub(super) m: Option<u32>,
    /// Of a task: the id of the goroutine that polls it.
    pub(super) polled_by: Option<u64>,
    /// It was stopped by a signal.
    pub(super) preempted: bool,
    /// Identifies it: the address of its G or task.
    pub(super) address: u64,
    /// The address of the goroutine that waits for its end. Otherwise a small number, or the address
    /// of something else.
    pub(super) joined_by: u64,
    sched: u64,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Place {
    pub(super) file: String,
    pub(super) line: u32,
}

/// The stack of a goroutine, as far as it can be read.
pub(super) enum Stack {
    /// Code addresses, innermost first.
    Addresses(Vec<u64>),
    /// It runs, and its thread is not blocked.
    Running,
    NotStarted,
    /// It changed whenever it was read.
    Unknown,
    /// The core file does not contain it.
    NotInCore,
    /// It is a task that waits.
    None,
}

/// Reads the goroutines of all runtimes.
pub(super) fn read(process: &Process, unwinder: &mut Unwinder) -> Result<Vec<Runtime>, String> {
    read_at(process, &Layout::find_all(process)?, unwinder)
}

/// As [`read`], with the tables of the process.
pub(super) fn read_at(
    process: &Process,
    layouts: &[Layout],
    unwinder: &mut Unwinder,
) -> Result<Vec<Runtime>, String> {
    let mut runtimes = Vec::new();
    for layout in layouts {
        let reader = Reader::new(process, layout)?;
        runtimes.extend(reader.runtimes(unwinder)?);
    }
    Ok(runtimes)
}

/// Offsets and numbers from the table.
macro_rules! offsets {
    ($($field:ident = $name:literal,)+) => {
        struct Offsets {
            /// Of the frame pointer and the program counter that a switch saves.
            saved_fp: u64,
            saved_pc: u64,
            /// Of the saved registers in the trampoline's frame; None on x86_64, which needs none.
            trampoline_registers: Option<u64>,
            $($field: u64,)+
        }
        impl Offsets {
            fn new(cpu: Cpu, layout: &Layout) -> Result<Offsets, String> {
                let (fp, pc) = match cpu {
                    Cpu::X86_64 => ("saved.rbp", "saved.rip"),
                    Cpu::Aarch64 => ("saved.x29", "saved.x30"),
                };
                let (saved_fp, saved_pc) = (layout.get(fp)?, layout.get(pc)?);
                let trampoline_registers = layout.get("trampoline.registers").ok();
                let offsets = Offsets {
                    saved_fp,
                    saved_pc,
                    trampoline_registers,
                    $($field: layout.get($name)?,)+
                };
                offsets.check()?;
                Ok(offsets)
            }
        }
    };
}

offsets! {
    slabs = "slabs",
    slab_gs = "slab.gs",
    slab_next = "slab.next",
    slab_count = "slab.count",
    g_size = "g.size",
    g_head = "g.head",
    g_sp = "g.sp",
    g_tp = "g.tp",
    g_state = "g.state",
    g_stopped = "g.stopped_by_signal",
    g_stack = "g.stack",
    g_sched = "g.sched",
    g_body = "g.body",
    g_task = "g.task",
    g_id = "g.id",
    g_parent = "g.parent",
    g_created_at = "g.created_at",
    g_name = "g.name",
    g_join = "g.join",
    body_type_name = "body.type_name",
    head_since = "head.since_ms",
    head_reason = "head.reason",
    head_kind = "head.kind",
    kind_carrier = "kind.carrier",
    state_dead = "state.dead",
    state_runnable = "state.runnable",
    state_waiting = "state.waiting",
    chunks = "chunks",
    chunk_next = "chunk.next",
    chunk_block_bytes = "chunk.block_bytes",
    chunk_first_block = "chunk.first_block",
    chunk_bytes = "chunk.bytes",
    task_head = "task.head",
    task_state = "task.state",
    task_body = "task.body",
    task_join = "task.join",
    task_sched = "task.sched",
    task_id = "task.id",
    task_origin = "task.origin",
    labels_created_at = "labels.created_at",
    task_contents = "task.contents",
    task_scheduled = "task_state.scheduled",
    task_running = "task_state.running",
    task_alive = "task_state.alive",
    task_type_name = "task_body.type_name",
    task_boxed = "task_body.boxed",
    task_name_at = "task_body.name_at",
    ms = "ms",
    m_next = "m.next",
    m_id = "m.id",
    m_tid = "m.tid",
    m_p = "m.p",
    m_hold = "m.hold",
    m_current = "m.current",
    m_sched = "m.sched",
    hold_retaken = "hold.retaken",
    p_id = "p.id",
    p_status = "p.status",
    p_holder = "p.holder",
    p_idle = "p_status.idle",
    p_running = "p_status.running",
    sched_id = "sched.id",
    sched_ps = "sched.ps",
    sched_ps_made = "sched.ps_made",
    sched_started_at = "sched.started_at",
    sched_coarse_ms = "sched.coarse_ms",
    stack_base = "stack_top.base",
    stack_sp_below = "stack_top.sp_below",
    guard_bytes = "stack.guard_bytes",
    saved_bytes = "saved.bytes",
    entry_stub = "entry_stub",
    trampoline = "trampoline",
    trampoline_end = "trampoline_end",
}

impl Offsets {
    /// Fails if a field is not inside the bytes that are read of its G, task or chunk, or if these
    /// are too many.
    fn check(&self) -> Result<(), String> {
        let fits = |end: u64, fields: &[(u64, u64)]| {
            fields.iter().all(|(at, bytes)| at.checked_add(*bytes).is_some_and(|at| at <= end))
        };
        let head = |at: u64| {
            let field = |offset: u64| at.saturating_add(offset);
            [(field(self.head_since), 4), (field(self.head_reason), 1), (field(self.head_kind), 1)]
        };
        let words = |fields: &[u64]| fields.iter().map(|&at| (at, 8)).collect::<Vec<_>>();
        let g_words = words(&[
            self.g_sp,
            self.g_tp,
            self.g_stack,
            self.g_sched,
            self.g_body,
            self.g_task,
            self.g_id,
            self.g_parent,
            self.g_created_at,
            self.g_join,
        ]);
        let task_words = words(&[
            self.task_state,
            self.task_body,
            self.task_join,
            self.task_sched,
            self.task_id,
            self.task_origin,
        ]);
        let (g, task, chunk) = (self.g_size, self.task_contents, self.chunk_bytes);
        let slab = g.checked_mul(self.slab_count);
        let is_whole = (64..=SUBJECT_BYTES_MAX).contains(&g)
            && slab.is_some_and(|bytes| (1..=SLAB_BYTES_MAX).contains(&bytes))
            && fits(g, &g_words)
            && fits(g, &[(self.g_state, 4), (self.g_stopped, 1), (self.g_name, 16)])
            && fits(g, &head(self.g_head))
            && (1..=SUBJECT_BYTES_MAX).contains(&task)
            && fits(task, &task_words)
            && fits(task, &head(self.task_head))
            && chunk <= SLAB_BYTES_MAX
            && fits(chunk, &words(&[self.chunk_block_bytes, self.chunk_next]));
        if is_whole { Ok(()) } else { Err("the table of trefoil is damaged".to_owned()) }
    }
}

struct Reader<'a> {
    process: &'a Process,
    at: Offsets,
    /// The texts of wait reasons.
    reasons: Vec<String>,
    location: LocationLayout,
}

/// Where a `std::panic::Location` has its fields.
struct LocationLayout {
    file: u64,
    line: u64,
}

impl LocationLayout {
    /// The size of a `Location`.
    const BYTES: usize = 24;

    /// Finds the fields by their values in an example, because std does not say where they are.
    fn find(process: &Process, layout: &Layout) -> Result<LocationLayout, String> {
        let unknown = || "the places of goroutines have an unknown form".to_owned();
        let sample = layout.get("location.sample")?;
        let (line, column) =
            (layout.get("location.sample_line")?, layout.get("location.sample_column")?);
        let sample = process.u64(sample).map_err(|_| unknown())?;
        let mut bytes = [0; LocationLayout::BYTES];
        process.read(sample, &mut bytes).map_err(|_| unknown())?;
        let find = |value: u64| {
            (0..LocationLayout::BYTES).step_by(4).find(|&at| u64::from(u32_at(&bytes, at)) == value)
        };
        let line = find(line).filter(|_| find(column).is_some()).ok_or_else(unknown)?;
        let is_file = |&at: &usize| {
            let text = process.text(u64_at(&bytes, at), u64_at(&bytes, at + 8));
            text.is_some_and(|text| text.ends_with(".rs"))
        };
        let file = (0..=8).step_by(8).find(is_file).ok_or_else(unknown)?;
        Ok(LocationLayout { file: file as u64, line: line as u64 })
    }
}

/// What was read of one runtime besides its goroutines.
struct Clock {
    now_ms: u64,
}

/// Results that many goroutines share, by address.
#[derive(Default)]
struct Cache {
    places: HashMap<u64, Option<Place>>,
    functions: HashMap<u64, Option<String>>,
    clocks: HashMap<u64, Option<Clock>>,
}

impl<'a> Reader<'a> {
    fn new(process: &'a Process, layout: &Layout) -> Result<Reader<'a>, String> {
        let count = layout.get("reasons.count")?.min(256);
        let table = layout.get("reasons")?;
        let reason = |i: u64| {
            let entry = process.u64(table).ok()?.wrapping_add(16 * i);
            process.text(process.u64(entry).ok()?, process.u64(entry.wrapping_add(8)).ok()?)
        };
        let reasons = (0..count).map(|i| reason(i).unwrap_or_else(|| "waiting".into())).collect();
        Ok(Reader {
            process,
            at: Offsets::new(process.cpu, layout)?,
            reasons,
            location: LocationLayout::find(process, layout)?,
        })
    }

    fn runtimes(&self, unwinder: &mut Unwinder) -> Result<Vec<Runtime>, String> {
        let ms = self.ms();
        let mut cache = Cache::default();
        let mut polled = HashSet::new();
        let mut all = Vec::new();
        self.for_each_g(|address, bytes| {
            if self.state(bytes) == self.at.state_dead {
                return;
            }
            let g = self.goroutine(address, bytes, &ms, &mut cache, unwinder);
            let Some(mut g) = g else { return };
            if self.head_byte(bytes, self.at.g_head + self.at.head_kind) == self.at.kind_carrier {
                let task = u64_at(bytes, self.at.g_task as usize);
                // A carrier without a task is no goroutine of the program's.
                if task == 0 || !polled.insert(task) || !self.become_task(&mut g, task, &mut cache)
                {
                    return;
                }
            }
            all.push(g);
        });
        self.for_each_task(|address, bytes| {
            if !polled.contains(&address) {
                all.extend(self.task(address, bytes, &mut cache));
            }
        });
        all.sort_by_key(|g| (g.sched, g.id));
        let mut scheds: Vec<u64> = ms.iter().map(|m| m.sched).collect();
        scheds.extend(all.iter().map(|g| g.sched));
        scheds.sort_unstable();
        scheds.dedup();
        let mut runtimes: Vec<Runtime> = scheds
            .into_iter()
            .filter_map(|sched| {
                let id = self.word(sched, self.at.sched_id).ok()?;
                Some(Runtime {
                    id,
                    ps: self.ps(sched, &ms),
                    ms: ms.iter().filter(|m| m.sched == sched).map(M::copy).collect(),
                    goroutines: all.extract_if(.., |g| g.sched == sched).collect(),
                })
            })
            .collect();
        runtimes.sort_by_key(|runtime| runtime.id);
        Ok(runtimes)
    }

    /// Returns the Ms that have a thread.
    fn ms(&self) -> Vec<M> {
        let mut ms = Vec::new();
        let mut seen = HashSet::new();
        let mut next = self.process.u64(self.at.ms).unwrap_or(0);
        while next != 0 && seen.len() < MS_MAX && seen.insert(next) {
            ms.extend(self.m(next));
            next = self.word(next, self.at.m_next).unwrap_or(0);
        }
        ms.sort_by_key(|m| (m.sched, m.id));
        ms
    }

    /// Returns an M, or None if no thread uses it.
    fn m(&self, address: u64) -> Option<M> {
        let tid = self.half_word(address, self.at.m_tid).ok().filter(|&tid| tid != 0)?;
        let thread = self.process.thread(tid)?;
        let hold = self.byte(address, self.at.m_hold).ok()?;
        let p = self.word(address, self.at.m_p).ok()?;
        let owns_p = p != 0 && u64::from(hold) != self.at.hold_retaken;
        let p = owns_p.then(|| self.half_word(p, self.at.p_id).ok()).flatten();
        Some(M {
            address,
            id: self.half_word(address, self.at.m_id).ok()?,
            thread,
            current: self.word(address, self.at.m_current).ok()?,
            p,
            sched: self.word(address, self.at.m_sched).ok()?,
        })
    }

    fn ps(&self, sched: u64, ms: &[M]) -> Vec<P> {
        let read = || {
            let table = self.word(sched, self.at.sched_ps).ok()?;
            let made = self.half_word(sched, self.at.sched_ps_made).ok()?;
            Some((table, u64::from(made).min(PS_MAX)))
        };
        let Some((table, made)) = read() else { return Vec::new() };
        let p = |i: u64| {
            let p = self.word(table, 8 * i).ok()?;
            let status = u64::from(self.half_word(p, self.at.p_status).ok()?);
            let holder = self.word(p, self.at.p_holder).ok()?;
            Some(P {
                id: self.half_word(p, self.at.p_id).ok()?,
                status: match status {
                    s if s == self.at.p_idle => "idle",
                    s if s == self.at.p_running => "running",
                    _ => "retired",
                },
                m: ms.iter().find(|m| m.address == holder).map(|m| m.id),
            })
        };
        (0..made).filter_map(p).collect()
    }

    /// Calls `f` with the address and the bytes of every G, dead ones included.
    fn for_each_g(&self, mut f: impl FnMut(u64, &[u8])) {
        let size = self.at.g_size as usize;
        let mut gs = vec![0; size * self.at.slab_count as usize];
        let mut seen = HashSet::new();
        let mut slab = self.process.u64(self.at.slabs).unwrap_or(0);
        let slabs_max = SLABS_MAX.min(SUBJECTS_MAX / self.at.slab_count as usize);
        while slab != 0 && seen.len() < slabs_max && seen.insert(slab) {
            let first = slab.wrapping_add(self.at.slab_gs);
            if self.process.read(first, &mut gs).is_err() {
                return;
            }
            for (i, bytes) in gs.chunks_exact(size).enumerate() {
                f(first.wrapping_add((i * size) as u64), bytes);
            }
            slab = self.word(slab, self.at.slab_next).unwrap_or(0);
        }
    }

    /// Calls `f` with the address and the head of every block of a task, free ones included.
    fn for_each_task(&self, mut f: impl FnMut(u64, &[u8])) {
        let size = self.at.chunk_bytes as usize;
        let (first, head) = (self.at.chunk_first_block as usize, self.at.task_contents as usize);
        let mut bytes = vec![0; size];
        let mut seen = HashSet::new();
        let mut blocks = 0;
        let mut chunk = self.process.u64(self.at.chunks).unwrap_or(0);
        while chunk != 0 && seen.len() < CHUNKS_MAX && seen.insert(chunk) {
            if self.process.read(chunk, &mut bytes).is_err() {
                return;
            }
            let block = u64_at(&bytes, self.at.chunk_block_bytes as usize) as usize;
            if block < head || block > size {
                return;
            }
            for at in (first..=size - block).step_by(block) {
                blocks += 1;
                if blocks > SUBJECTS_MAX {
                    return;
                }
                f(chunk.wrapping_add(at as u64), &bytes[at..at + head]);
            }
            chunk = u64_at(&bytes, self.at.chunk_next as usize);
        }
    }

    /// Reads the word at an offset from an address.
    fn word(&self, address: u64, offset: u64) -> io::Result<u64> {
        self.process.u64(address.wrapping_add(offset))
    }

    fn half_word(&self, address: u64, offset: u64) -> io::Result<u32> {
        self.process.u32(address.wrapping_add(offset))
    }

    fn byte(&self, address: u64, offset: u64) -> io::Result<u8> {
        let mut byte = [0];
        self.process.read(address.wrapping_add(offset), &mut byte)?;
        Ok(byte[0])
    }

    fn state(&self, g: &[u8]) -> u64 {
        u32_at(g, self.at.g_state as usize).into()
    }

    fn head_byte(&self, bytes: &[u8], at: u64) -> u64 {
        bytes[at as usize].into()
    }

    /// Reads a goroutine until it does not change meanwhile. Returns None if it has ended.
    fn goroutine(
        &self,
        address: u64,
        first: &[u8],
        ms: &[M],
        cache: &mut Cache,
        unwinder: &mut Unwinder,
    ) -> Option<Goroutine> {
        let at = &self.at;
        let mut bytes = first.to_vec();
        let identity = |bytes: &[u8]| {
            let word = |offset| u64_at(bytes, offset as usize);
            (word(at.g_id), self.state(bytes), word(at.g_sp))
        };
        let mut stack = Stack::Unknown;
        let mut running = None;
        for _ in 0..TRIES {
            if self.state(&bytes) == at.state_dead {
                return None;
            }
            running = self.m_of(address, &bytes, ms);
            stack = self.stack(&bytes, running, unwinder);
            let before = identity(&bytes);
            self.process.read(address, &mut bytes).ok()?;
            if identity(&bytes) == before {
                break;
            }
            stack = Stack::Unknown;
        }
        if self.state(&bytes) == at.state_dead {
            return None;
        }
        let word = |offset: u64| u64_at(&bytes, offset as usize);
        let (sched, state) = (word(at.g_sched), self.state(&bytes));
        let is_waiting = state == at.state_waiting;
        let reason = self.head_byte(&bytes, at.g_head + at.head_reason);
        let since = u32_at(&bytes, (at.g_head + at.head_since) as usize);
        Some(Goroutine {
            kind: Kind::Goroutine,
            id: word(at.g_id),
            name: self.name(word(at.g_name), word(at.g_name + 8)),
            state: match state {
                s if s == at.state_waiting => self.reason(reason),
                s if s == at.state_runnable => "runnable".into(),
                _ => "running".into(),
            },
            is_waiting,
            waited_ms: is_waiting.then(|| self.waited(sched, since, cache)).flatten(),
            parent: word(at.g_parent),
            function: self.function(word(at.g_body), at.body_type_name, cache),
            place: self.place(word(at.g_created_at), cache),
            stack,
            thread: running.map(|m| m.thread.clone()),
            m: running.map(|m| m.id),
            polled_by: None,
            preempted: state == at.state_runnable && bytes[at.g_stopped as usize] != 0,
            address,
            joined_by: word(at.g_join),
            sched,
        })
    }

    /// Returns the M that runs the goroutine.
    fn m_of<'m>(&self, address: u64, g: &[u8], ms: &'m [M]) -> Option<&'m M> {
        let state = self.state(g);
        let suspended = state == self.at.state_waiting || state == self.at.state_runnable;
        ms.iter().find(|m| m.current == address && !suspended)
    }

    fn reason(&self, number: u64) -> String {
        self.reasons.get(number as usize).cloned().unwrap_or_else(|| "waiting".into())
    }

    fn name(&self, address: u64, len: u64) -> Option<String> {
        if address == 0 { None } else { self.process.text(address, len) }
    }

    /// Returns how long a goroutine or task has waited.
    fn waited(&self, sched: u64, since: u32, cache: &mut Cache) -> Option<u64> {
        let clock = cache.clocks.entry(sched).or_insert_with(|| {
            let coarse = u64::from(self.half_word(sched, self.at.sched_coarse_ms).ok()?);
            let started = self.word(sched, self.at.sched_started_at).ok()?;
            // A core file does not say when it was written: the runtime's coarse clock does, about.
            let now_ms = match self.process.is_live() {
                true => monotonic_nanos().saturating_sub(started) / 1_000_000,
                false => coarse,
            };
            Some(Clock { now_ms })
        });
        let waited = (clock.as_ref()?.now_ms as u32).wrapping_sub(since);
        // The coarse clock of `since` may be a little ahead.
        Some(if waited > u32::MAX / 2 { 0 } else { waited.into() })
    }

    /// Returns the address of the place where a task was spawned, from its word for that. Bit 0 says
    /// that its labels are between.
    fn task_place(&self, origin: u64) -> u64 {
        match origin & 1 {
            0 => origin,
            _ => self.word(origin & !1, self.at.labels_created_at).unwrap_or(0),
        }
    }

    fn place(&self, address: u64, cache: &mut Cache) -> Option<Place> {
        let read = || {
            let file = self.word(address, self.location.file).ok()?;
            let len = self.word(address, self.location.file + 8).ok()?;
            let line = self.half_word(address, self.location.line).ok()?;
            Some(Place { file: self.process.text(file, len)?, line })
        };
        cache.places.entry(address).or_insert_with(read).clone()
    }

    /// Returns the function that contains the closure or future of a body: an empty name if the body
    /// has neither, None if the name cannot be read.
    fn function(&self, body: u64, type_name: u64, cache: &mut Cache) -> Option<String> {
        let read = || {
            let function = self.word(body, type_name).ok()?;
            let mut code = [0; 24];
            self.process.read(function, &mut code).ok()?;
            let (address, len) = returned_text(self.process.cpu, function, &code)?;
            let name = self.process.text(address, len)?;
            Some(name.strip_suffix("::{{closure}}").unwrap_or(&name).to_owned())
        };
        cache.functions.entry(body).or_insert_with(read).clone()
    }

    /// Unwinds the stack of a goroutine.
    fn stack(&self, g: &[u8], running: Option<&M>, unwinder: &mut Unwinder) -> Stack {
        let at = &self.at;
        let word = |offset: u64| u64_at(g, offset as usize);
        let state = self.state(g);
        let suspended = state == at.state_waiting || state == at.state_runnable;
        if suspended && word(at.g_tp) == 0 {
            return Stack::NotStarted;
        }
        let top = word(at.g_stack);
        let bounds = || {
            let mut header = [0; STACK_TOP_BYTES];
            self.process.read(top, &mut header).ok()?;
            let field = |offset: u64, bytes: u64| {
                let end = offset.checked_add(bytes)?;
                (end <= STACK_TOP_BYTES as u64).then_some(offset as usize)
            };
            let base = u64_at(&header, field(at.stack_base, 8)?);
            let below = u64::from(u32_at(&header, field(at.stack_sp_below, 4)?));
            Some((base.checked_add(at.guard_bytes)?, top.checked_sub(below)?))
        };
        let unreadable = match self.process.is_live() {
            true => Stack::Unknown,
            false => Stack::NotInCore,
        };
        let Some((low, high)) = bounds() else { return unreadable };
        let on_stack = |sp: u64| sp.is_multiple_of(8) && sp >= low && sp < high;
        let mut memory;
        let registers = if suspended {
            let sp = word(at.g_sp);
            if !on_stack(sp) {
                return unreadable;
            }
            memory = StackMemory::new(self.process, sp, high);
            let mut saved = |offset| memory.word(sp.checked_add(offset)?);
            let (Some(pc), Some(fp)) = (saved(at.saved_pc), saved(at.saved_fp)) else {
                return unreadable;
            };
            if pc == at.entry_stub {
                return Stack::NotStarted;
            }
            Registers { pc, sp: sp.wrapping_add(at.saved_bytes), fp, lr: pc }
        } else {
            match running.and_then(|m| m.thread.registers) {
                Some(registers) if on_stack(registers.sp) => {
                    memory = StackMemory::new(self.process, registers.sp, high);
                    registers
                }
                _ => return Stack::Running,
            }
        };
        let innermost = if suspended { Innermost::Call } else { Innermost::Instruction };
        let code = at.trampoline..at.trampoline_end;
        let trampoline = Trampoline { code, registers: at.trampoline_registers };
        let addresses =
            unwinder.unwind(registers, innermost, &trampoline, |address| memory.word(address));
        if addresses.is_empty() { unreadable } else { Stack::Addresses(addresses) }
    }

    /// Turns a carrier into the task that it polls. Returns false if the task has ended.
    fn become_task(&self, g: &mut Goroutine, address: u64, cache: &mut Cache) -> bool {
        let mut bytes = vec![0; self.at.task_contents as usize];
        if self.process.read(address, &mut bytes).is_err() {
            return false;
        }
        let Some(task) = self.task(address, &bytes, cache) else { return false };
        g.kind = Kind::Task;
        g.polled_by = Some(g.id);
        (g.id, g.name, g.function, g.place) = (task.id, task.name, task.function, task.place);
        (g.parent, g.joined_by) = (0, task.joined_by);
        true
    }

    /// Reads a task that is not being polled. Returns None if the block is free.
    fn task(&self, address: u64, bytes: &[u8], cache: &mut Cache) -> Option<Goroutine> {
        let at = &self.at;
        let word = |offset: u64| u64_at(bytes, offset as usize);
        let state = word(at.task_state);
        if state & at.task_alive == 0 {
            return None;
        }
        let sched = word(at.task_sched);
        let is_waiting = state & (at.task_scheduled | at.task_running) == 0;
        let reason = self.head_byte(bytes, at.task_head + at.head_reason);
        let since = u32_at(bytes, (at.task_head + at.head_since) as usize);
        let body = word(at.task_body);
        let function = self.function(body, at.task_type_name, cache);
        // A block without a future stands for a waker.
        if function.as_deref() == Some("") {
            return None;
        }
        Some(Goroutine {
            kind: Kind::Task,
            id: word(at.task_id),
            name: self.task_name(address, body),
            state: match is_waiting {
                true => self.reason(reason),
                false if state & at.task_running != 0 => "running".into(),
                false => "runnable".into(),
            },
            is_waiting,
            waited_ms: is_waiting.then(|| self.waited(sched, since, cache)).flatten(),
            parent: 0,
            function,
            place: self.place(self.task_place(word(at.task_origin)), cache),
            stack: Stack::None,
            thread: None,
            m: None,
            polled_by: None,
            preempted: false,
            address,
            joined_by: word(at.task_join),
            sched,
        })
    }

    fn task_name(&self, task: u64, body: u64) -> Option<String> {
        let offset = self.word(body, self.at.task_name_at).ok()?;
        if offset > 1 << 30 {
            return None;
        }
        let mut contents = task.wrapping_add(self.at.task_contents);
        if self.byte(body, self.at.task_boxed).ok()? != 0 {
            contents = self.process.u64(contents).ok()?;
        }
        let name = contents.checked_add(offset)?;
        self.name(self.process.u64(name).ok()?, self.word(name, 8).ok()?)
    }
}

impl M {
    fn copy(&self) -> M {
        M { thread: self.thread.clone(), ..*self }
    }

    /// Returns whether it runs this goroutine.
    pub(super) fn runs(&self, goroutine: &Goroutine) -> bool {
        goroutine.m == Some(self.id)
    }
}

/// A stack, of which a part was copied.
struct StackMemory<'a> {
    process: &'a Process,
    start: u64,
    end: u64,
    /// Where the copy begins.
    copied_from: u64,
    bytes: Vec<u8>,
}

impl<'a> StackMemory<'a> {
    fn new(process: &'a Process, start: u64, end: u64) -> StackMemory<'a> {
        StackMemory { process, start, end, copied_from: start, bytes: Vec::new() }
    }

    /// Returns the word at an address, or None if it is not on the stack.
    fn word(&mut self, address: u64) -> Option<u64> {
        let inside = address >= self.start && address.checked_add(8)? <= self.end;
        if !inside || !address.is_multiple_of(8) {
            return None;
        }
        let is_copied = address >= self.copied_from
            && address + 8 - self.copied_from <= self.bytes.len() as u64;
        if !is_copied {
            self.copied_from = address.saturating_sub(STACK_BYTES_BELOW).max(self.start);
            self.bytes.resize(STACK_BYTES.min(self.end - self.copied_from) as usize, 0);
            if self.process.read(self.copied_from, &mut self.bytes).is_err() {
                // The core file may have a part of it.
                self.bytes.clear();
                return self.process.u64(address).ok();
            }
        }
        Some(u64_at(&self.bytes, (address - self.copied_from) as usize))
    }
}

/// Returns the address and the length of the text that a function returns, by its machine code.
/// `type_name` is compiled to a few instructions. A debugger cannot call it, and the name is nowhere
/// else.
fn returned_text(cpu: Cpu, function: u64, code: &[u8]) -> Option<(u64, u64)> {
    match cpu {
        Cpu::X86_64 => returned_text_x86_64(function, code),
        Cpu::Aarch64 => returned_text_aarch64(function, code),
    }
}

/// As [`returned_text`]: `adrp x0, page`, `add x0, x0, offset`, and `mov w1, length`, of which a debug
/// build makes two by way of another register.
fn returned_text_aarch64(function: u64, code: &[u8]) -> Option<(u64, u64)> {
    // What each register has, as far as it is known.
    let mut registers = [None; 32];
    for (i, code) in code.chunks_exact(4).enumerate() {
        let (word, here) = (u32_at(code, 0), function.wrapping_add(4 * i as u64));
        let (to, from) = ((word & 31) as usize, (word >> 5 & 31) as usize);
        registers[to] = if word & 0x9f00_0000 == 0x9000_0000 {
            // adrp: 21 bits, the lowest two of them apart from the others.
            let pages = (word >> 5 & 0x7_ffff) << 2 | word >> 29 & 3;
            let pages = i64::from((pages << 11) as i32 >> 11);
            Some((here & !0xfff).wrapping_add_signed(pages << 12))
        } else if word & 0xffc0_0000 == 0x9100_0000 {
            // add, of 12 bits.
            registers[from].map(|base: u64| base.wrapping_add(u64::from(word >> 10 & 0xfff)))
        } else if word & 0x7fe0_0000 == 0x5280_0000 {
            // mov of 16 bits.
            Some(u64::from(word >> 5 & 0xffff))
        } else if word & 0x7fe0_ffe0 == 0x2a00_03e0 {
            // mov of a register.
            registers[(word >> 16 & 31) as usize]
        } else if word == 0xd65f_03c0 {
            // ret
            return registers[0].zip(registers[1]);
        } else {
            return None;
        };
    }
    None
}

/// As [`returned_text`]: `lea rax, [rip + offset]`, or `mov eax, address`; and `mov edx, length`.
fn returned_text_x86_64(function: u64, code: &[u8]) -> Option<(u64, u64)> {
    let (mut address, mut len) = (None, None);
    let mut at = 0;
    while at + 8 <= code.len() && (address.is_none() || len.is_none()) {
        at += match code[at..] {
            // endbr64; push rbp; mov rbp, rsp
            [0xf3, 0x0f, 0x1e, 0xfa, ..] => 4,
            [0x55, ..] => 1,
            [0x48, 0x89, 0xe5, ..] => 3,
            [0x48, 0x8d, 0x05, ..] => {
                let offset = u32_at(code, at + 3) as i32;
                address =
                    Some(function.wrapping_add(at as u64 + 7).wrapping_add_signed(offset.into()));
                7
            }
            [0xb8, ..] => {
                address = Some(u32_at(code, at + 1).into());
                5
            }
            [0xba, ..] => {
                len = Some(u32_at(code, at + 1).into());
                5
            }
            _ => return None,
        };
    }
    address.zip(len)
}

fn monotonic_nanos() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one `timespec`.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::super::memory::tests::random;
    use super::*;

    #[test]
    fn damaged_memory_is_read_in_bounded_time() {
        let runtime = trefoil::Runtime::builder().procs(2).build().unwrap();
        let (keep, rx) = trefoil::chan::bounded::<()>(0);
        let of_tasks = rx.clone();
        for i in 0..20 {
            let (rx, builder) = (rx.clone(), trefoil::Builder::new().name(format!("g {i}")));
            runtime.run(|| builder.go(move || rx.recv()).map(drop)).unwrap();
            let rx = of_tasks.clone();
            runtime.run(|| drop(trefoil::task::spawn(async move { rx.recv_async().await })));
        }
        let mut process = Process::open(&std::process::id().to_string()).unwrap();
        let mut unwinder = Unwinder::new(&process);
        let layouts = || Layout::find_all(&Process::open(&std::process::id().to_string()).unwrap());
        let whole = Reader::new(&process, &layouts().unwrap()[0]).unwrap();
        let found = whole.runtimes(&mut unwinder).unwrap();
        assert!(found.iter().map(|r| r.goroutines.len()).sum::<usize>() >= 40);
        let mut layout = layouts().unwrap().remove(0);
        let state = std::cell::Cell::new(0x1234_5678_9abc_def1);
        let mut read = 0;
        for round in 0..2000 {
            let rarity = [1, 10, 100, 1000][round % 4];
            process.damaged(random(&state), rarity);
            if let Ok(reader) = Reader::new(&process, &layout) {
                let _ = reader.runtimes(&mut unwinder);
                read += 1;
            }
        }
        assert!(read > 500, "only {read} were read");
        // A table with wrong numbers.
        for _ in 0..300 {
            process.damaged(random(&state), u64::MAX);
            let before = layout.clone();
            layout.change(|value| match random(&state) % 200 {
                0 => *value ^= 1 << (random(&state) % 64),
                1 => *value = random(&state) % 4096,
                2 => *value = u64::MAX,
                _ => {}
            });
            if let Ok(reader) = Reader::new(&process, &layout) {
                let _ = reader.runtimes(&mut unwinder);
            }
            layout = before;
        }
        drop(keep);
    }

    #[test]
    fn a_list_that_leads_back_to_itself_ends() {
        let runtime = trefoil::Runtime::builder().procs(1).build().unwrap();
        let process = Process::open(&std::process::id().to_string()).unwrap();
        let layout = Layout::find_all(&process).unwrap().remove(0);
        let mut reader = Reader::new(&process, &layout).unwrap();
        let at = &reader.at;
        let bytes = [
            at.slab_gs + at.g_size * at.slab_count,
            at.slab_next + 8,
            at.chunk_bytes,
            at.m_next + 8,
        ];
        let mut memory = vec![0u64; (bytes.into_iter().max().unwrap() / 8 + 1) as usize];
        let start = memory.as_ptr() as u64;
        let first = [start];
        let list = first.as_ptr() as u64;
        (reader.at.slabs, reader.at.chunks, reader.at.ms) = (list, list, list);
        memory[(reader.at.slab_next / 8) as usize] = start;
        let mut gs = 0;
        reader.for_each_g(|_, _| gs += 1);
        assert_eq!(gs, reader.at.slab_count);
        memory[(reader.at.m_next / 8) as usize] = start;
        assert_eq!(reader.ms().len(), 0);
        memory[(reader.at.chunk_next / 8) as usize] = start;
        let block = reader.at.chunk_bytes - reader.at.chunk_first_block;
        memory[(reader.at.chunk_block_bytes / 8) as usize] = block;
        let mut blocks = 0;
        reader.for_each_task(|_, _| blocks += 1);
        assert_eq!(blocks, 1);
        // A block that is larger than its chunk.
        memory[(reader.at.chunk_block_bytes / 8) as usize] = reader.at.chunk_bytes + 1;
        reader.for_each_task(|_, _| panic!("there is none"));
        drop(runtime);
    }

    #[test]
    fn a_stack_is_read_in_parts() {
        let process = Process::open(&std::process::id().to_string()).unwrap();
        let words: Vec<u64> = (0..100_000).collect();
        let start = words.as_ptr() as u64;
        let address = |i: u64| start + 8 * i;
        // As if the stack were as large as the address space.
        let end = !7;
        let mut stack = StackMemory::new(&process, start, end);
        for i in [0, 1, 2047, 2048, 2040, 99_000, 5, 60_000, 59_990] {
            assert_eq!(stack.word(address(i)), Some(i));
            assert!(stack.bytes.len() as u64 <= STACK_BYTES);
        }
        assert_eq!(stack.word(address(1) + 4), None);
        assert_eq!(stack.word(start - 8), None);
        assert_eq!(stack.word(end), None);
        assert_eq!(stack.word(end - 8), None);
        assert!(stack.bytes.len() as u64 <= STACK_BYTES);
    }

    #[test]
    fn the_text_that_a_function_returns_is_found_by_its_code() {
        let named: fn() -> &'static str = std::any::type_name::<Goroutine>;
        // SAFETY: the code of a function; the page after it may end, but not within a program.
        let code = unsafe { std::slice::from_raw_parts(named as *const u8, 24) };
        let cpu = Process::open(&std::process::id().to_string()).unwrap().cpu;
        let found = returned_text(cpu, named as *const u8 as u64, code);
        assert_eq!(found, Some((named().as_ptr() as u64, named().len() as u64)));
        assert_eq!(returned_text(Cpu::X86_64, 0, &[0xc3; 24]), None);
        assert_eq!(returned_text(Cpu::Aarch64, 0, &[0xc3; 24]), None);
    }

    #[test]
    fn the_text_that_a_function_of_aarch64_returns_is_found() {
        let code = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>();
        // adrp x0, +0x38e pages; add x0, x0, #0x900; mov w8, #0x13a; mov w1, w8; ret
        let debug = code(&[0xd000_1c60, 0x9124_0000, 0x5280_2748, 0x2a08_03e1, 0xd65f_03c0]);
        let text = returned_text(Cpu::Aarch64, 0xca7a0, &debug);
        assert_eq!(text, Some((0x45_8900, 0x13a)));
        // adrp x0, -1 page; add x0, x0, #8; mov w1, #5; ret
        let release = code(&[0xf0ff_ffe0, 0x9100_2000, 0x5280_00a1, 0xd65f_03c0, 0]);
        assert_eq!(returned_text(Cpu::Aarch64, 0x5004, &release), Some((0x4008, 5)));
        // Without `ret`.
        assert_eq!(returned_text(Cpu::Aarch64, 0x5004, &release[..12]), None);
    }
}
