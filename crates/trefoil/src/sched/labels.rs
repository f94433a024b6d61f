//! Labels: key and value pairs of a goroutine or task, for profiles and dumps.
//!
//! A set of labels is immutable. A goroutine or task has one word for its set: null if it has none,
//! so that a spawn without labels costs a load. The word of a G is `G::labels`. A task has no room
//! for a second word, so its word is also that for where it was spawned ([`TaskOrigin`]).
//!
//! The word points to a [`LabelNode`], which counts its references: the words, the guards of
//! `labels!`, and the samples of a profile that is being taken. The set itself is in an `Arc`.
//!
//! # Reading the labels of others
//! A dump, or a signal handler on a thread whose goroutine has just ended, reads the word while the
//! owner may replace it. That is sound because
//! 1. the memory of a node is never freed, only reused, so that its count can always be read;
//! 2. a reader raises the count only if it is not zero, and only a node whose count is zero is
//!    emptied or filled;
//! 3. the reader then checks that the word has not changed, and otherwise tries again.
//!
//! A signal handler never lowers a count: that might free memory.

use crate::sched::current_g;
use crate::sched::task::Task;
use crate::sys::free_list::{FreeLink, FreeList, Reusable};
use std::cell::UnsafeCell;
use std::mem::offset_of;
use std::panic::Location;
use std::ptr::{NonNull, from_ref, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// How often a reader tries again, if the owner replaces its labels all the time.
const TRIES: u32 = 64;

/// Keys and values, sorted by key; each key occurs once.
pub(crate) type LabelSet = [(Box<str>, Box<str>)];

/// See the head of the file.
pub(crate) struct LabelNode {
    references: AtomicU32,
    /// Written only by the owner of a node without references.
    set: UnsafeCell<Option<Arc<LabelSet>>>,
    /// For the node of a task: where the task was spawned. Otherwise null.
    created_at: AtomicPtr<Location<'static>>,
    free_link: FreeLink<LabelNode>,
}

/// Where debuggers find where a task with labels was spawned (`observe/layout.rs`).
pub(crate) const LAYOUT: &[(&str, usize)] =
    &[("labels.created_at", offset_of!(LabelNode, created_at))];

// SAFETY: `set` is written by one thread while the count is zero, and only read otherwise.
unsafe impl Sync for LabelNode {}
// SAFETY: nothing in it is tied to a thread.
unsafe impl Send for LabelNode {}

/// Nodes without references.
static UNUSED: FreeList<LabelNode> = FreeList::new();

impl Reusable for LabelNode {
    fn free_link(&self) -> &FreeLink<LabelNode> {
        &self.free_link
    }
}

impl LabelNode {
    /// Raises the count, unless it is zero. Async-signal-safe.
    fn try_acquire(&'static self) -> Option<LabelRef> {
        let mut count = self.references.load(Ordering::Relaxed);
        while count != 0 {
            // Acquire: pairs with the Release in `LabelRef::new`, so the set is visible.
            match self.references.compare_exchange_weak(
                count,
                count + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(LabelRef(self)),
                Err(now) => count = now,
            }
        }
        None
    }
}

/// A reference to a node, which therefore keeps its contents.
pub(crate) struct LabelRef(&'static LabelNode);

impl LabelRef {
    /// Makes a node. Allocates, so the caller is outside the runtime.
    pub(crate) fn new(
        set: Arc<LabelSet>,
        created_at: Option<&'static Location<'static>>,
    ) -> LabelRef {
        let node = UNUSED.pop_or_leak(|| LabelNode {
            references: AtomicU32::new(0),
            set: UnsafeCell::new(None),
            created_at: AtomicPtr::new(null_mut()),
            free_link: FreeLink::new(),
        });
        // SAFETY: this thread took the node from the list, so that no reference to it exists.
        unsafe { *node.set.get() = Some(set) };
        let created_at = created_at.map_or(null_mut(), |at| from_ref(at).cast_mut());
        node.created_at.store(created_at, Ordering::Relaxed);
        node.references.store(1, Ordering::Release);
        LabelRef(node)
    }

    pub(crate) fn set(&self) -> &Arc<LabelSet> {
        // SAFETY: while there is a reference, the set is not written.
        match unsafe { (*self.0.set.get()).as_ref() } {
            Some(set) => set,
            None => unreachable!("a node with references has a set"),
        }
    }

    fn created_at(&self) -> Option<&'static Location<'static>> {
        // SAFETY: null, or a reference to a static (`new`).
        unsafe { self.0.created_at.load(Ordering::Relaxed).as_ref() }
    }

    /// Turns the reference into a word, for [`LabelRef::from_word`].
    pub(crate) fn into_word(self) -> u64 {
        let word = from_ref(self.0).expose_provenance() as u64;
        std::mem::forget(self);
        word
    }

    /// Takes back a reference from a word. Returns None for 0.
    ///
    /// # Safety
    /// `word` is 0 or came from [`LabelRef::into_word`], whose reference is taken back once.
    pub(crate) unsafe fn from_word(word: u64) -> Option<LabelRef> {
        let node = std::ptr::with_exposed_provenance::<LabelNode>(word as usize);
        // SAFETY: null, or a node: nodes are never freed.
        unsafe { node.as_ref() }.map(LabelRef)
    }

    fn into_raw(self) -> *mut LabelNode {
        let node = from_ref(self.0).cast_mut();
        std::mem::forget(self);
        node
    }

    fn is(&self, node: *const LabelNode) -> bool {
        std::ptr::eq(self.0, node)
    }
}

impl Clone for LabelRef {
    fn clone(&self) -> LabelRef {
        self.0.references.fetch_add(1, Ordering::Relaxed);
        LabelRef(self.0)
    }
}

impl Drop for LabelRef {
    fn drop(&mut self) {
        // As for an Arc: what was done with the set happens before they are dropped.
        if self.0.references.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        // SAFETY: the last reference is gone, and a reader does not make a new one.
        let set = unsafe { (*self.0.set.get()).take() };
        UNUSED.push(self.0);
        drop(set);
    }
}

/// The labels of a goroutine: null, a node, or [`ENDED`].
pub(crate) struct LabelWord(AtomicPtr<LabelNode>);

/// The goroutine's closure has returned. Its destructors of thread-locals cannot set labels, which
/// would not be removed any more.
const ENDED: *mut LabelNode = std::ptr::without_provenance_mut(1);

impl LabelWord {
    pub(crate) const fn new() -> LabelWord {
        LabelWord(AtomicPtr::new(null_mut()))
    }

    /// Returns the labels.
    #[inline(always)]
    pub(crate) fn read(&self) -> Option<LabelRef> {
        if self.0.load(Ordering::Relaxed).addr() <= ENDED.addr() {
            return None;
        }
        read_stable(&self.0, node_unless_ended)
    }

    /// Returns the labels of the goroutine that this thread runs. Async-signal-safe.
    pub(crate) fn read_in_handler(&self) -> Option<LabelRef> {
        read_in_handler(&self.0, node_unless_ended)
    }

    /// Spawner: begins the life of a goroutine.
    #[inline(always)]
    pub(crate) fn begin(&self, inherited: Option<LabelRef>) {
        let word = inherited.map_or(null_mut(), LabelRef::into_raw);
        // Release: a reader sees the node's contents.
        self.0.store(word, Ordering::Release);
    }

    /// By the goroutine at its end, outside the runtime.
    #[inline(always)]
    pub(crate) fn end(&self) {
        let before = self.0.load(Ordering::Relaxed);
        self.0.store(ENDED, Ordering::Relaxed);
        if !before.is_null() {
            Self::release_slow(before);
        }
    }

    #[cold]
    fn release_slow(before: *mut LabelNode) {
        // SAFETY: the word owned a reference to this node, unless it was `ENDED`.
        drop(unsafe { owned(before) });
    }

    /// By the goroutine: replaces its labels, and returns those that it had. Returns `new` if the
    /// goroutine has ended.
    fn replace(&self, new: Option<LabelRef>) -> Result<Option<LabelRef>, Option<LabelRef>> {
        if self.0.load(Ordering::Relaxed) == ENDED {
            return Err(new);
        }
        let new = new.map_or(null_mut(), LabelRef::into_raw);
        let before = self.0.swap(new, Ordering::AcqRel);
        // SAFETY: the word owned a reference to this node.
        Ok(unsafe { owned(before) })
    }
}

fn node_unless_ended(word: *mut LabelNode) -> *mut LabelNode {
    if word == ENDED { null_mut() } else { word }
}

/// Takes the reference that a word owned.
///
/// # Safety
/// The word with this value owned a reference, and does not any more.
unsafe fn owned(node: *mut LabelNode) -> Option<LabelRef> {
    if node == ENDED {
        return None;
    }
    // SAFETY: null, or a node: nodes are never freed.
    unsafe { node.as_ref() }.map(LabelRef)
}

/// Reads a word that its owner may replace meanwhile; see the head of the file.
fn read_stable<T>(
    word: &AtomicPtr<T>,
    node_of: impl Fn(*mut T) -> *mut LabelNode,
) -> Option<LabelRef> {
    for _ in 0..TRIES {
        let value = word.load(Ordering::Acquire);
        // SAFETY: null, or a node: nodes are never freed.
        let node = unsafe { node_of(value).as_ref() }?;
        let labels = node.try_acquire();
        if labels.is_some() && word.load(Ordering::Acquire) == value {
            return labels;
        }
    }
    None
}

/// As [`read_stable`], in a signal handler on the thread of the word's owner. Does not read the
/// word again: only if the owner has just ended can the node have another user, and then the sample
/// has that user's labels.
fn read_in_handler<T>(
    word: &AtomicPtr<T>,
    node_of: impl Fn(*mut T) -> *mut LabelNode,
) -> Option<LabelRef> {
    // SAFETY: null, or a node: nodes are never freed.
    unsafe { node_of(word.load(Ordering::Acquire)).as_ref() }?.try_acquire()
}

/// Where a task was spawned, and its labels: the address of a `Location`, or that of a node that
/// contains it, with [`HAS_LABELS`].
pub(crate) struct TaskOrigin(AtomicPtr<u8>);

/// Bit 0 of a [`TaskOrigin`].
const HAS_LABELS: usize = 1;

impl TaskOrigin {
    #[track_caller]
    pub(crate) fn new() -> TaskOrigin {
        TaskOrigin(AtomicPtr::new(plain(Location::caller())))
    }

    /// Spawner: begins the life of a task. `labels` came from [`inherited_by_task`].
    #[inline(always)]
    pub(crate) fn begin(&self, created_at: &'static Location<'static>, labels: Option<LabelRef>) {
        let word = labels.map_or_else(|| plain(created_at), with_labels);
        // Release: a reader sees the node's contents.
        self.0.store(word, Ordering::Release);
    }

    /// By the owner of the task at its end, outside the runtime.
    #[inline(always)]
    pub(crate) fn end(&self) {
        if self.0.load(Ordering::Relaxed).addr() & HAS_LABELS != 0 {
            self.end_slow();
        }
    }

    #[cold]
    fn end_slow(&self) {
        drop(self.replace(None));
    }

    #[inline(always)]
    pub(crate) fn labels(&self) -> Option<LabelRef> {
        if self.0.load(Ordering::Relaxed).addr() & HAS_LABELS == 0 {
            return None;
        }
        read_stable(&self.0, node_of)
    }

    /// Returns the labels of the task that this thread polls. Async-signal-safe.
    pub(crate) fn labels_in_handler(&self) -> Option<LabelRef> {
        read_in_handler(&self.0, node_of)
    }

    pub(crate) fn created_at(&self) -> &'static Location<'static> {
        loop {
            let word = self.0.load(Ordering::Acquire);
            if node_of(word).is_null() {
                // SAFETY: made by `plain` from a static.
                return unsafe { &*word.cast::<Location<'static>>() };
            }
            if let Some(labels) = self.labels()
                && let Some(created_at) = labels.created_at()
            {
                return created_at;
            }
        }
    }

    /// By the task in a poll: replaces its labels, and returns those that it had.
    fn replace(&self, new: Option<LabelRef>) -> Option<LabelRef> {
        let created_at = self.created_at();
        let new = new.map_or_else(|| plain(created_at), with_labels);
        let before = node_of(self.0.swap(new, Ordering::AcqRel));
        // SAFETY: the word owned a reference to this node.
        unsafe { owned(before) }
    }
}

fn plain(created_at: &'static Location<'static>) -> *mut u8 {
    from_ref(created_at).cast_mut().cast()
}

fn with_labels(labels: LabelRef) -> *mut u8 {
    labels.into_raw().cast::<u8>().map_addr(|address| address | HAS_LABELS)
}

/// Returns the node of a [`TaskOrigin`]'s word; null if it has none.
fn node_of(word: *mut u8) -> *mut LabelNode {
    if word.addr() & HAS_LABELS == 0 {
        return null_mut();
    }
    word.map_addr(|address| address & !HAS_LABELS).cast()
}

const _: () = assert!(align_of::<Location<'static>>() > HAS_LABELS);
const _: () = assert!(align_of::<LabelNode>() > HAS_LABELS);

/// What labels belong to.
#[derive(Clone, Copy)]
enum LabelOwner {
    Goroutine(&'static crate::sched::g::G),
    Task(&'static Task),
}

impl LabelOwner {
    /// Returns the task that is polled here, or else the goroutine. None on a plain thread.
    #[inline(always)]
    fn current() -> Option<LabelOwner> {
        let g = current_g()?;
        Some(g.task.get().map_or(LabelOwner::Goroutine(g), LabelOwner::Task))
    }

    #[inline(always)]
    fn labels(self) -> Option<LabelRef> {
        match self {
            LabelOwner::Goroutine(g) => g.labels.read(),
            LabelOwner::Task(task) => task.origin.labels(),
        }
    }

    fn id(self) -> u64 {
        match self {
            LabelOwner::Goroutine(g) => g.id(),
            LabelOwner::Task(task) => task.id(),
        }
    }

    fn is(self, other: LabelOwner) -> bool {
        match (self, other) {
            (LabelOwner::Goroutine(a), LabelOwner::Goroutine(b)) => std::ptr::eq(a, b),
            (LabelOwner::Task(a), LabelOwner::Task(b)) => std::ptr::eq(a, b),
            _ => false,
        }
    }

    /// Makes a node with the labels that the owner is to have.
    fn node(self, set: Arc<LabelSet>) -> LabelRef {
        let created_at = match self {
            LabelOwner::Goroutine(_) => None,
            LabelOwner::Task(task) => Some(task.origin.created_at()),
        };
        LabelRef::new(set, created_at)
    }

    fn replace(self, new: Option<LabelRef>) -> Result<Option<LabelRef>, Option<LabelRef>> {
        match self {
            LabelOwner::Goroutine(g) => g.labels.replace(new),
            LabelOwner::Task(task) => Ok(task.origin.replace(new)),
        }
    }
}

/// Returns the labels of the running goroutine or task.
#[inline(always)]
pub(crate) fn current() -> Option<LabelRef> {
    LabelOwner::current()?.labels()
}

/// Returns the labels that a new task inherits from the running goroutine or task. Allocates if
/// there are any.
#[inline(always)]
pub(crate) fn inherited_by_task(created_at: &'static Location<'static>) -> Option<LabelRef> {
    let labels = current()?;
    Some(LabelRef::new(labels.set().clone(), Some(created_at)))
}

/// Labels that the running goroutine or task has until this is dropped.
pub(crate) struct LabelGuard {
    owner: LabelOwner,
    owner_id: u64,
    installed: NonNull<LabelNode>,
    before: Option<LabelRef>,
}

// SAFETY: a guard that is dropped elsewhere changes nothing; see `drop`.
unsafe impl Send for LabelGuard {}
// SAFETY: there is nothing to do with a shared guard.
unsafe impl Sync for LabelGuard {}

impl LabelGuard {
    /// Adds labels to those of the running goroutine or task. `merge` gets the present set. Returns
    /// None on a plain thread, and at the end of a goroutine.
    pub(crate) fn set(merge: impl FnOnce(&LabelSet) -> Arc<LabelSet>) -> Option<LabelGuard> {
        let owner = LabelOwner::current()?;
        let present = owner.labels();
        let node = owner.node(merge(present.as_ref().map_or(&[], |labels| labels.set())));
        let installed = NonNull::from(node.0);
        let before = owner.replace(Some(node)).ok()?;
        Some(LabelGuard { owner, owner_id: owner.id(), installed, before })
    }
}

impl Drop for LabelGuard {
    fn drop(&mut self) {
        let is_here = LabelOwner::current()
            .is_some_and(|here| here.is(self.owner) && here.id() == self.owner_id);
        // Another guard may have been dropped out of order.
        if is_here && self.owner.labels().is_some_and(|labels| labels.is(self.installed.as_ptr())) {
            // What the word had is dropped outside the runtime, as this is user code.
            drop(self.owner.replace(self.before.take()));
        }
    }
}
