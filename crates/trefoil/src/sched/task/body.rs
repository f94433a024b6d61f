//! The body of a task: its future until it has ended, its output after that.
//!
//! Both use the same memory, one after the other. It follows the [`Task`] in its block if it fits,
//! otherwise it is in a box. The runtime does not know their types, and reaches them only through
//! [`TaskBody`], a table of functions.
//!
//! Invariant 1: the memory contains the future while the task is alive, and the output from then
//! until `take` or `drop_output`. The join cell says which side owns the output
//! (`goroutine/join.rs`).

use super::Task;
use super::block::{self, Class};
use super::local::LocalHome;
use crate::sched::g::with_names;
use std::alloc::Layout;
use std::any::Any;
use std::future::Future;
use std::marker::PhantomData;
use std::mem::{ManuallyDrop, MaybeUninit, offset_of};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::task::{Context, Poll};

/// Why a task has no output.
pub(crate) enum Failure {
    Cancelled,
    /// The payload of its panic.
    Panicked(Box<dyn Any + Send>),
}

/// The output of a task, or why there is none.
pub(crate) type Outcome<T> = Result<T, Failure>;

/// How a task that a goroutine polls is scheduled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WakeBy {
    /// It goes to a run queue, and a carrier polls it.
    Queue,
    /// The goroutine or thread that polls it is woken (`blocker.rs`).
    Sleeper,
    /// It goes to the queue of its set (`local.rs`).
    Home,
}

/// What a poll, or the drop of the future, has ended with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Polled {
    Pending,
    /// The output is stored.
    Ready,
    /// As `Ready`; the output is a panic.
    Panicked,
}

/// The operations on a future and its output, whose types the runtime does not know.
pub(crate) struct TaskBody {
    /// Polls the future. If it is ready or panics, drops it and stores the output.
    pub(crate) poll: unsafe fn(&Task, &mut Context<'_>) -> Polled,
    /// Drops the future and stores that the task was cancelled.
    pub(crate) cancel: unsafe fn(&Task) -> Polled,
    /// Drops an unwanted output.
    pub(crate) drop_output: unsafe fn(&Task),
    /// Frees the name or home, and the box, if there are any. The block is free then.
    pub(crate) free: unsafe fn(&Task),
    pub(crate) name: unsafe fn(&Task) -> Option<&str>,
    /// Returns the home of a task of a set.
    pub(crate) home: unsafe fn(&Task) -> Option<&LocalHome>,
    /// Dropping the output and freeing the body do nothing, unless the output is a panic.
    pub(crate) is_plain: bool,
    /// Returns the future's type name, whose path names the function that contains the future.
    pub(crate) type_name: fn() -> &'static str,
    pub(crate) class: Class,
    pub(crate) wake_by: WakeBy,
    /// The body is in a box, whose address is in the block.
    boxed: bool,
    /// Where the name is in the body, for debuggers, which cannot call `name`. [`NO_NAME`] if there
    /// is none.
    name_at: usize,
}

/// See [`TaskBody::name_at`].
const NO_NAME: usize = usize::MAX;

/// Where debuggers find the fields of a body (`observe/layout.rs`).
pub(crate) const LAYOUT: &[(&str, usize)] = &[
    ("task_body.type_name", offset_of!(TaskBody, type_name)),
    ("task_body.boxed", offset_of!(TaskBody, boxed)),
    ("task_body.name_at", offset_of!(TaskBody, name_at)),
];

impl TaskBody {
    /// The body of a block that has never had a task.
    pub(crate) const NONE: &'static TaskBody = &TaskBody::without_future(WakeBy::Queue, Class::MIN);

    /// The body of a block that stands for a waker only.
    pub(crate) const fn without_future(wake_by: WakeBy, class: Class) -> TaskBody {
        TaskBody {
            poll: |_, _| Polled::Pending,
            cancel: |_| Polled::Ready,
            drop_output: |_| (),
            free: |_| (),
            name: |_| None,
            home: |_| None,
            is_plain: true,
            type_name: || "",
            class,
            wake_by,
            boxed: false,
            name_at: NO_NAME,
        }
    }
}

union FutureOrOutput<F: Future> {
    future: ManuallyDrop<F>,
    output: ManuallyDrop<Outcome<F::Output>>,
}

/// What follows the [`Task`] in its block, or is in a box. The output is at its beginning.
#[repr(C)]
struct Storage<F: Future, X> {
    contents: FutureOrOutput<F>,
    extra: X,
}

/// What is stored with a future: its task's name or home. Most tasks have neither, and need no
/// memory for it.
pub(crate) trait TaskExtra: Send + 'static {
    const WAKE_BY: WakeBy = WakeBy::Queue;
    /// It is a `Box<str>`.
    const IS_NAME: bool = false;

    fn name(&self) -> Option<&str> {
        None
    }

    fn home(&self) -> Option<&LocalHome> {
        None
    }
}

impl TaskExtra for () {}

/// The name of a task.
impl TaskExtra for Box<str> {
    const IS_NAME: bool = true;

    fn name(&self) -> Option<&str> {
        Some(self)
    }
}

/// Which operations a task has. Its owner changes it; any thread may read it.
pub(crate) struct BodyCell(AtomicPtr<TaskBody>);

impl BodyCell {
    pub(super) const fn new(body: &'static TaskBody) -> BodyCell {
        BodyCell(AtomicPtr::new(std::ptr::from_ref(body).cast_mut()))
    }

    #[inline]
    pub(crate) fn get(&self) -> &'static TaskBody {
        // SAFETY: a static.
        unsafe { &*self.0.load(Ordering::Relaxed) }
    }

    /// Returns it to a thread that does not own the task. What was put into the block with it is
    /// visible.
    pub(super) fn published(&self) -> &'static TaskBody {
        // Acquire: pairs with the Release in `set`.
        // SAFETY: a static.
        unsafe { &*self.0.load(Ordering::Acquire) }
    }

    #[inline]
    pub(super) fn set(&self, body: &'static TaskBody) {
        // Release: pairs with the Acquire in `published`.
        self.0.store(std::ptr::from_ref(body).cast_mut(), Ordering::Release);
    }
}

/// The functions of a [`TaskBody`] for one type of future.
pub(crate) struct TypedTaskBody<F, X>(PhantomData<(F, X)>);

impl<F: Future, X: TaskExtra> TypedTaskBody<F, X> {
    const LAYOUT: Layout = Layout::new::<Storage<F, X>>();
    /// None if the body is in a box.
    const INLINE: Option<Class> = Class::for_body(Self::LAYOUT);
    const BODY: TaskBody = TaskBody {
        poll: Self::poll,
        cancel: Self::cancel,
        drop_output: Self::drop_output,
        free: Self::free,
        name: Self::name,
        home: Self::home,
        is_plain: Self::INLINE.is_some()
            && !std::mem::needs_drop::<F::Output>()
            && !std::mem::needs_drop::<X>(),
        type_name: std::any::type_name::<F>,
        class: match Self::INLINE {
            Some(class) => class,
            None => Class::MIN,
        },
        wake_by: X::WAKE_BY,
        boxed: Self::INLINE.is_none(),
        name_at: if X::IS_NAME { offset_of!(Storage<F, X>, extra) } else { NO_NAME },
    };

    pub(crate) const fn class() -> Class {
        Self::BODY.class
    }

    /// Returns memory for a body that is too large for a block, or null if it fits. Allocates, so
    /// callers call it before they enter the runtime.
    #[inline]
    pub(crate) fn reserve() -> *mut u8 {
        match Self::INLINE {
            Some(_) => std::ptr::null_mut(),
            None => Box::into_raw(Box::<Storage<F, X>>::new_uninit()).cast(),
        }
    }

    /// Frees the memory of `reserve`.
    ///
    /// # Safety
    /// `reserved` came from `reserve`, and no task uses it.
    pub(crate) unsafe fn unreserve(reserved: *mut u8) {
        if Self::INLINE.is_none() {
            // SAFETY: the caller's contract.
            drop(unsafe { Box::from_raw(reserved.cast::<MaybeUninit<Storage<F, X>>>()) });
        }
    }

    /// Puts the future into `task`.
    ///
    /// # Safety
    /// The block of `task` is of [`TypedTaskBody::class`] and owned by the caller. `reserved` came
    /// from `reserve`. The future, its output and `extra` may be used and dropped on other threads
    /// for as long as the task lives.
    #[inline]
    pub(crate) unsafe fn put(task: &Task, future: F, extra: X, reserved: *mut u8) {
        let inline = block::contents(task);
        // SAFETY: the caller owns the block, whose class is large enough, and the box of `reserve`.
        unsafe {
            let storage = if Self::INLINE.is_some() {
                inline
            } else {
                inline.cast::<*mut u8>().write(reserved);
                reserved
            };
            let contents = FutureOrOutput { future: ManuallyDrop::new(future) };
            storage.cast::<Storage<F, X>>().write(Storage { contents, extra });
        }
        task.body.set(&Self::BODY);
    }

    fn storage(task: &Task) -> *mut Storage<F, X> {
        let inline = block::contents(task);
        if Self::INLINE.is_some() {
            return inline.cast();
        }
        // SAFETY: a body in a box keeps its pointer in the block (see `put`).
        unsafe { inline.cast::<*mut Storage<F, X>>().read() }
    }

    unsafe fn poll(task: &Task, context: &mut Context<'_>) -> Polled {
        // SAFETY: the storage of a task that is alive is initialised.
        let contents = unsafe { &raw mut (*Self::storage(task)).contents };
        // SAFETY: invariant 1: the future is stored here, and only the caller touches it. It is
        // not moved before it is dropped.
        let polled = catch_unwind(AssertUnwindSafe(|| unsafe {
            let future: &mut F = &mut *(contents.cast::<F>());
            Pin::new_unchecked(future).poll(context)
        }));
        match polled {
            Ok(Poll::Pending) => Polled::Pending,
            // SAFETY: as above.
            Ok(Poll::Ready(output)) => unsafe { Self::end(task, Ok(output)) },
            // SAFETY: as above.
            Err(payload) => unsafe { Self::end(task, Err(Failure::Panicked(payload))) },
        }
    }

    unsafe fn cancel(task: &Task) -> Polled {
        // SAFETY: as in `poll`.
        unsafe { Self::end(task, Err(Failure::Cancelled)) }
    }

    /// Drops the future and stores `outcome`, or the panic of the future's destructor.
    unsafe fn end(task: &Task, outcome: Outcome<F::Output>) -> Polled {
        // SAFETY: as in `poll`. The output takes the future's memory after the future was dropped.
        unsafe {
            let contents = &raw mut (*Self::storage(task)).contents;
            let dropped = catch_unwind(AssertUnwindSafe(|| contents.cast::<F>().drop_in_place()));
            let outcome = match dropped {
                Ok(()) => outcome,
                Err(payload) => {
                    // At most one panic can be returned; a second one is like a panic in a
                    // destructor of the first.
                    drop_caught(outcome, task);
                    Err(Failure::Panicked(payload))
                }
            };
            let panicked = matches!(outcome, Err(Failure::Panicked(_)));
            contents.write(FutureOrOutput { output: ManuallyDrop::new(outcome) });
            if panicked { Polled::Panicked } else { Polled::Ready }
        }
    }

    unsafe fn drop_output(task: &Task) {
        // SAFETY: the caller owns the output (invariant 1).
        let outcome = unsafe { take::<F::Output>(task) };
        drop_caught(outcome, task);
    }

    unsafe fn free(task: &Task) {
        let storage = Self::storage(task);
        // SAFETY: the caller owns the block, and the output was moved out. `unreserve` frees the
        // box of `reserve`, if there is one.
        unsafe {
            if std::mem::needs_drop::<X>() {
                // A dump may be reading it.
                let extra = with_names(|| (&raw mut (*storage).extra).read());
                drop(extra);
            }
            Self::unreserve(storage.cast());
        }
    }

    unsafe fn name(task: &Task) -> Option<&str> {
        // SAFETY: the name is written once, before the task is shared, and freed with the block.
        unsafe { (*Self::storage(task)).extra.name() }
    }

    unsafe fn home(task: &Task) -> Option<&LocalHome> {
        // SAFETY: as in `name`.
        unsafe { (*Self::storage(task)).extra.home() }
    }
}

/// Drops an output that no handle wants. A panic in its destructor ends the process, as in std.
fn drop_caught<T>(outcome: Outcome<T>, task: &Task) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(outcome))) {
        std::mem::forget::<Box<dyn Any + Send>>(payload);
        crate::sched::fatal(format_args!(
            "task {}: its output panicked while it was dropped",
            task.id()
        ));
    }
}

/// Moves the output out of the task.
///
/// # Safety
/// The caller owns the output (invariant 1), and `T` is its type.
pub(crate) unsafe fn take<T>(task: &Task) -> Outcome<T> {
    let inline = block::contents(task);
    // SAFETY: the caller's contract; the output is at the beginning of the storage.
    unsafe {
        let storage = if task.body.get().boxed { inline.cast::<*mut u8>().read() } else { inline };
        storage.cast::<Outcome<T>>().read()
    }
}
