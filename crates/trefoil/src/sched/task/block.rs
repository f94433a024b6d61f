//! The memory of tasks: blocks in size classes, made in chunks.
//!
//! A block begins with a [`Task`] and has room for its future and output. Chunks are mapped from
//! the kernel and never unmapped (`mod.rs`, invariant 1). There are two levels of free lists per
//! class: one per P, and one for the process.
//!
//! A future that is larger than the largest class is in a box, and its block is of the smallest
//! class.
//!
//! Rejected: blocks from the program's allocator. A stale waker would write to memory that has
//! become something else, so each waker would need a reference count.

use super::Task;
use super::body::TaskBody;
use crate::sched::m::Rt;
use crate::sched::runnable::{RunList, Unpacked};
use crate::sys::lock::Lock;
use crate::sys::syscalls;
use std::alloc::Layout;
use std::io;
use std::mem::offset_of;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Sizes of the blocks, the [`Task`] at the beginning included.
const SIZES: [usize; CLASSES] = [128, 192, 256, 320, 384, 512, 768, 1024];
const CLASSES: usize = 8;
/// Memory of a chunk.
const CHUNK_BYTES: usize = 64 << 10;
/// Free blocks of a class that a P keeps; above the limit half of them go to the central list.
const LOCAL_FREE_MAX: usize = 512;

/// A size class of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Class(u8);

impl Class {
    pub(crate) const MIN: Class = Class(0);

    /// Returns the class for a body of this layout, or None if it must be in a box.
    pub(crate) const fn for_body(body: Layout) -> Option<Class> {
        if body.align() > align_of::<Task>() {
            return None;
        }
        let mut class = 0;
        while class < CLASSES {
            if size_of::<Task>() + body.size() <= SIZES[class] {
                return Some(Class(class as u8));
            }
            class += 1;
        }
        None
    }

    /// Returns whether it is [`Class::MIN`].
    pub(crate) const fn is_min(self) -> bool {
        self.0 == 0
    }

    fn bytes(self) -> usize {
        SIZES[usize::from(self.0)]
    }
}

/// Returns the address behind the [`Task`], where its body is.
#[inline(always)]
pub(crate) fn contents(task: &Task) -> *mut u8 {
    // The address comes from the chunk's exposed provenance: a `&Task` covers the head only.
    let address = std::ptr::from_ref(task).addr() + size_of::<Task>();
    std::ptr::with_exposed_provenance_mut(address)
}

/// Blocks made together. Never unmapped.
pub(crate) struct Chunk {
    /// The chunk that was made before this one, or null.
    next: *mut Chunk,
    block_bytes: usize,
}

/// Where the blocks of a chunk begin.
const FIRST_BLOCK: usize = 64;
const _: () = assert!(size_of::<Chunk>() <= FIRST_BLOCK);

/// Every chunk that was made, newest first. A dump finds all tasks here.
pub(crate) static CHUNKS: AtomicPtr<Chunk> = AtomicPtr::new(null_mut());

/// Free blocks that no P keeps, by class.
static CENTRAL_FREE: [Lock<RunList>; CLASSES] = [const { Lock::new(RunList::new()) }; CLASSES];

/// A P's free blocks, by class.
pub(crate) struct FreeTasks([RunList; CLASSES]);

impl FreeTasks {
    pub(crate) const fn new() -> FreeTasks {
        FreeTasks([const { RunList::new() }; CLASSES])
    }

    /// Takes a free block from this list, or else from the central list, or else from a new chunk.
    #[inline]
    pub(crate) fn take(&mut self, class: Class) -> io::Result<&'static Task> {
        match pop(&mut self.0[usize::from(class.0)]) {
            Some(task) => Ok(task),
            None => self.take_slow(class),
        }
    }

    #[cold]
    fn take_slow(&mut self, class: Class) -> io::Result<&'static Task> {
        let free = &mut self.0[usize::from(class.0)];
        let mut central = CENTRAL_FREE[usize::from(class.0)].lock();
        for _ in 0..LOCAL_FREE_MAX / 2 {
            let Some(task) = pop(&mut central) else { break };
            free.push_front(task);
        }
        drop(central);
        if free.is_empty() {
            grow(class, free)?;
        }
        Ok(pop(free).expect("grown just now"))
    }

    /// Puts back the block of a task that has ended, has no handle, and whose body was freed.
    #[inline]
    pub(crate) fn put(&mut self, task: &'static Task) {
        let class = task.body.get().class;
        let free = &mut self.0[usize::from(class.0)];
        free.push_front(task);
        if free.len() > LOCAL_FREE_MAX {
            spill_slow(class, free, LOCAL_FREE_MAX / 2);
        }
    }

    /// Moves all blocks to the central lists.
    pub(crate) fn drain(&mut self) {
        for (class, free) in (0..).zip(&mut self.0) {
            spill_slow(Class(class), free, 0);
        }
    }
}

fn pop(list: &mut RunList) -> Option<&'static Task> {
    match list.pop_front()?.unpack() {
        Unpacked::Task(task) => Some(task),
        Unpacked::Goroutine(_) => unreachable!("only tasks are put into these lists"),
    }
}

/// Moves all blocks except `keep` of them to the central list.
#[cold]
fn spill_slow(class: Class, free: &mut RunList, keep: usize) {
    let mut spilled = RunList::new();
    while free.len() > keep {
        let Some(task) = pop(free) else { break };
        spilled.push_back(task);
    }
    CENTRAL_FREE[usize::from(class.0)].lock().append(&mut spilled);
}

/// Takes a free block, inside the runtime or on a plain thread.
pub(crate) fn take(here: Option<Rt>, class: Class) -> io::Result<&'static Task> {
    match here {
        Some(rt) => rt.with_local(|local| local.free_tasks.take(class)),
        None => take_central(class),
    }
}

/// As [`FreeTasks::put`], inside the runtime or on a plain thread.
pub(crate) fn put(here: Option<Rt>, task: &'static Task) {
    match here {
        Some(rt) => rt.with_local(|local| local.free_tasks.put(task)),
        None => put_central(task),
    }
}

/// Takes a free block from the central list or a new chunk, for a thread without a P.
pub(crate) fn take_central(class: Class) -> io::Result<&'static Task> {
    let central = &CENTRAL_FREE[usize::from(class.0)];
    if let Some(task) = pop(&mut central.lock()) {
        return Ok(task);
    }
    let mut fresh = RunList::new();
    grow(class, &mut fresh)?;
    let task = pop(&mut fresh).expect("grown just now");
    central.lock().append(&mut fresh);
    Ok(task)
}

/// As [`FreeTasks::put`], for a thread without a P.
fn put_central(task: &'static Task) {
    CENTRAL_FREE[usize::from(task.body.get().class.0)].lock().push_front(task);
}

/// Makes a chunk and appends its blocks to `free`. The memory comes from mmap, not from malloc, as
/// for Gs (`g.rs`).
#[cold]
fn grow(class: Class, free: &mut RunList) -> io::Result<()> {
    // SAFETY: a new private mapping, anywhere.
    let memory =
        unsafe { syscalls::mmap_anonymous(null_mut(), CHUNK_BYTES, syscalls::READ_WRITE, 0) };
    let chunk: *mut Chunk = memory?.cast();
    // Wakers and `contents` make pointers from addresses.
    chunk.expose_provenance();
    let block_bytes = class.bytes();
    let mut head = CHUNKS.load(Ordering::Relaxed);
    // SAFETY: new memory of `CHUNK_BYTES`, page-aligned and not yet shared; every block is inside.
    unsafe {
        chunk.write(Chunk { next: head, block_bytes });
        for block in blocks(chunk, block_bytes) {
            block.write(Task::unused());
            // So that `put` finds the class.
            (*block.as_ptr()).body.set(class.body());
            free.push_back(block.as_ref());
        }
    }
    loop {
        // Release: pairs with the Acquire in `for_each`.
        match CHUNKS.compare_exchange_weak(head, chunk, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return Ok(()),
            Err(now) => head = now,
        }
        // SAFETY: not yet shared as a part of the list.
        unsafe { (*chunk).next = head };
    }
}

impl Class {
    /// Returns the body of a block of this class that has no task.
    fn body(self) -> &'static TaskBody {
        use super::body::WakeBy::Queue;
        static NONE: [TaskBody; CLASSES] = {
            let mut bodies = [const { TaskBody::without_future(Queue, Class::MIN) }; CLASSES];
            let mut class = 0;
            while class < CLASSES {
                bodies[class] = TaskBody::without_future(Queue, Class(class as u8));
                class += 1;
            }
            bodies
        };
        &NONE[usize::from(self.0)]
    }
}

/// Returns the blocks of a chunk.
fn blocks(chunk: *mut Chunk, block_bytes: usize) -> impl Iterator<Item = NonNull<Task>> {
    let count = (CHUNK_BYTES - FIRST_BLOCK) / block_bytes;
    // SAFETY: inside the chunk.
    (0..count).map(move |i| unsafe {
        NonNull::new_unchecked(chunk.byte_add(FIRST_BLOCK + i * block_bytes).cast::<Task>())
    })
}

/// Where debuggers find the blocks of a chunk (`observe/layout.rs`).
pub(crate) const LAYOUT: &[(&str, usize)] = &[
    ("chunk.next", offset_of!(Chunk, next)),
    ("chunk.block_bytes", offset_of!(Chunk, block_bytes)),
    ("chunk.first_block", FIRST_BLOCK),
    ("chunk.bytes", CHUNK_BYTES),
];

/// Calls `f` with every block that was ever made, free ones included. Of a task that it does not
/// own, `f` may read only the atomics and what the functions for dumps return.
pub(crate) fn for_each(f: &mut dyn FnMut(&'static Task)) {
    // Acquire: pairs with the Release in `grow`, so the blocks are initialised.
    let mut chunk = CHUNKS.load(Ordering::Acquire);
    while !chunk.is_null() {
        // SAFETY: chunks are never unmapped, and their heads do not change once they are shared.
        let Chunk { next, block_bytes } = unsafe { chunk.read() };
        for block in blocks(chunk, block_bytes) {
            // SAFETY: initialised, and never unmapped.
            f(unsafe { block.as_ref() });
        }
        chunk = next;
    }
}
