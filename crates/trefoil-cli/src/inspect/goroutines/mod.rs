//! The goroutines, tasks, threads and Ps of a process, read from outside.
//!
//! | file | content |
//! |---|---|
//! | `mod.rs` | what a command shows of a runtime, and the lists that lead to it |
//! | `offsets.rs` | where the process has the fields of its objects |
//! | `subjects.rs` | one goroutine or task |
//! | `stack.rs` | the stack of a goroutine |
//! | `waits.rs` | what a goroutine waits for, and the goroutines that hold it |
//! | `type_names.rs` | the name of the function that contains a closure or future |
//!
//! The process may run meanwhile, and its memory or its core file may be damaged. Every pointer is
//! read through [`Process`], which fails for an address that is not mapped; every list has a bound,
//! and ends where it comes back to an entry; sums of addresses wrap; a goroutine whose words do not
//! fit together is read again.

mod offsets;
mod stack;
mod subjects;
mod type_names;
mod waits;

use std::collections::HashSet;
use std::io;

use super::layout::Layout;
use super::memory::{Process, Thread, u64_at};
use super::stacks::Unwinder;
use offsets::{LocationLayout, Offsets};
use subjects::Cache;
pub(super) use waits::{Wait, What};

/// The largest numbers of slabs, chunks of tasks, Ms and Ps that are read. A list that is longer is
/// damaged.
const SLABS_MAX: usize = 1 << 20;
const CHUNKS_MAX: usize = 1 << 20;
/// The largest number of Gs, and of blocks of tasks.
const SUBJECTS_MAX: usize = 1 << 24;
const MS_MAX: usize = 1 << 16;
const PS_MAX: u64 = 1 << 12;

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
    /// What it waits for, if goroutines can hold that.
    pub(super) wait: Option<Wait>,
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

/// Reads the goroutines of all runtimes, with the tables of the process.
pub(super) fn read(
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

struct Reader<'a> {
    process: &'a Process,
    at: Offsets,
    /// The texts of wait reasons.
    reasons: Vec<String>,
    location: LocationLayout,
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
        self.find_holders(&mut all);
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

#[cfg(test)]
mod tests {
    use super::super::files::LoadedFiles;
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
        static MUTEX: trefoil::sync::Mutex<()> = trefoil::sync::Mutex::new(());
        runtime.run(|| {
            std::mem::forget(MUTEX.lock());
            for _ in 0..5 {
                trefoil::go(|| drop(MUTEX.lock()));
            }
        });
        let mut process = Process::open(&std::process::id().to_string()).unwrap();
        let loaded = LoadedFiles::read(&process);
        let mut unwinder = Unwinder::new(process.cpu, &loaded);
        let own = Process::open(&std::process::id().to_string()).unwrap();
        let layouts = || Layout::find_all(&own, &loaded);
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
    fn a_program_without_the_names_of_waits_is_read_without_them() {
        static MUTEX: trefoil::sync::Mutex<()> = trefoil::sync::Mutex::new(());
        let runtime = trefoil::Runtime::builder().procs(1).build().unwrap();
        let guard = runtime.run(|| {
            let guard = MUTEX.lock();
            trefoil::Builder::new().name("waiter").go(|| drop(MUTEX.lock())).unwrap();
            guard
        });
        let process = Process::open(&std::process::id().to_string()).unwrap();
        let loaded = LoadedFiles::read(&process);
        let mut unwinder = Unwinder::new(process.cpu, &loaded);
        let mut layout = Layout::find_all(&process, &loaded).unwrap().remove(0);
        let mut read = |layout: &Layout| loop {
            let found = super::read(&process, std::slice::from_ref(layout), &mut unwinder).unwrap();
            let mut all = found.into_iter().flat_map(|runtime| runtime.goroutines);
            let waiter = all.find(|g| g.name.as_deref() == Some("waiter")).unwrap();
            if waiter.is_waiting {
                return waiter;
            }
        };
        let wait = read(&layout).wait.unwrap();
        assert_eq!((wait.what, wait.has_deadline), (What::Mutex, false));
        layout.remove("g.waits_for");
        let waiter = read(&layout);
        assert_eq!(waiter.state, "sync.Mutex.Lock");
        assert!(waiter.wait.is_none());
        drop(guard);
        drop(runtime);
    }

    #[test]
    fn a_list_that_leads_back_to_itself_ends() {
        let runtime = trefoil::Runtime::builder().procs(1).build().unwrap();
        let process = Process::open(&std::process::id().to_string()).unwrap();
        let layout = Layout::find_all(&process, &LoadedFiles::read(&process)).unwrap().remove(0);
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
}
