//! Waiting for one of several descriptors: `poll`, `select`, `epoll_wait` and related functions,
//! with which other crates write event loops.
//!
//! A goroutine waits in the pollables of all its descriptors at once. Events that a pollable does
//! not know (urgent data, a hang-up alone) are waited for through an epoll instance of the call's
//! own, which is a descriptor too. A call that changes the thread's signal mask (`ppoll`,
//! `pselect`, `epoll_pwait` with a mask) is left to the kernel: the thread blocks, and loses its P.

use super::fds;
use super::io::{EOPNOTSUPP, RetryDecision, after_failed_wait, poll_now, wait_ready};
use super::park::{begin_wait, may_park};
use super::sleep::nanos;
use crate::sched::calls::{current_sched, sleep_until};
use crate::sched::netpoll::pollable::Direction;
use crate::sched::netpoll::wait_any::{Watched, wait_for_any};
use crate::sys::clock::{self, NEVER, Nanos, now};
use crate::sys::raw::{poll_ms, syscall};
use libc::{c_int, c_ulong, epoll_event, fd_set, pollfd, sigset_t, timespec, timeval};

/// The size of the kernel's signal mask.
const MASK_BYTES: usize = size_of::<u64>();
/// The most descriptors of a `select` that is served here. Sets longer than `fd_set` are left to
/// the kernel, which knows how much of them to read.
const MAX_SELECT_FDS: usize = libc::FD_SETSIZE;
/// The most descriptors of a `poll` that are waited for in their own pollables: the runtime visits
/// all of them without a pause.
const MAX_WATCHED: usize = 1024;

/// How long a call waits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Timeout {
    /// Not at all: it only polls.
    Zero,
    /// Until this time, or for ever ([`NEVER`]).
    Until(Nanos),
}

impl Timeout {
    /// Returns the timeout of `poll` and `epoll_wait`; a negative one is for ever.
    fn from_ms(ms: c_int) -> Timeout {
        match ms {
            0 => Timeout::Zero,
            1.. => Timeout::Until(clock::after_nanos(ms as u64 * 1_000_000)),
            _ => Timeout::Until(NEVER),
        }
    }

    /// Returns the timeout for a span; None is for ever.
    fn from_span(span: Option<Nanos>) -> Timeout {
        match span {
            Some(0) => Timeout::Zero,
            Some(span) => Timeout::Until(clock::after_nanos(span)),
            None => Timeout::Until(NEVER),
        }
    }

    /// Returns the time left.
    fn left(self) -> Nanos {
        match self {
            Timeout::Zero => 0,
            Timeout::Until(deadline) => deadline.saturating_sub(now()),
        }
    }
}

/// Returns the time left, as `poll` and `epoll_wait` take it.
fn left_ms(deadline: Nanos) -> usize {
    match deadline {
        NEVER => usize::MAX,
        _ => deadline.saturating_sub(now()).div_ceil(1_000_000).min(i32::MAX as u64) as usize,
    }
}

interpose! {
    /// libc's function.
    fn poll(list: *mut pollfd, count: c_ulong, timeout: c_int) -> c_int;
    on_goroutine => poll_for(list, count as usize, Timeout::from_ms(timeout))
}

interpose! {
    /// libc's function.
    fn ppoll(list: *mut pollfd, count: c_ulong, timeout: *const timespec,
        mask: *const sigset_t) -> c_int;
    on_goroutine => {
        // `Some(None)` is an invalid timeout; the kernel returns the error.
        let time = timeout.as_ref().map(nanos);
        if mask.is_null() && time != Some(None) {
            poll_for(list, count as usize, Timeout::from_span(time.flatten()))
        } else {
            // Left to the kernel, which changes the thread's mask and may write to the timeout.
            let mut copy = timeout.as_ref().copied();
            let at = copy.as_mut().map_or(0, |t| &raw mut *t as usize);
            let mask = mask as usize;
            syscall(libc::SYS_ppoll, [list as usize, count as usize, at, mask, MASK_BYTES])
        }
    }
}

/// How a `poll` waits.
enum PollWait {
    /// In the pollables of these descriptors.
    Watched(Vec<Watched>),
    /// In the pollable of an epoll instance.
    Epoll(PollEpoll),
}

impl PollWait {
    /// Returns None if the entries can be waited for in neither way.
    fn new(entries: &[pollfd]) -> Option<PollWait> {
        match watched(entries) {
            Some(all) => Some(PollWait::Watched(all)),
            None => PollEpoll::new(entries).map(PollWait::Epoll),
        }
    }

    /// Waits once. `Return` means that the deadline has passed.
    fn wait(&self, deadline: Nanos) -> RetryDecision {
        match self {
            PollWait::Watched(all) => match all[..] {
                [Watched { fd, direction, .. }] => wait_ready(fd, direction, deadline, None),
                _ => wait_ready_any(all, deadline),
            },
            PollWait::Epoll(epoll) => wait_ready(epoll.0, Direction::Read, deadline, None),
        }
    }
}

/// `poll`.
///
/// # Safety
/// `list` has `count` entries.
unsafe fn poll_for(list: *mut pollfd, count: usize, timeout: Timeout) -> isize {
    // SAFETY: the caller's list.
    let poll = || unsafe { poll_now(list, count) };
    let first = poll();
    let deadline = match timeout {
        Timeout::Until(deadline) if first == 0 => deadline,
        _ => return first,
    };
    if count == 0 {
        return sleep_by_poll(deadline);
    }
    let in_kernel = || {
        // SAFETY: the caller's list.
        unsafe { poll_ms(list, count, left_ms(deadline)) }
    };
    // A signal handler must not allocate.
    if !may_park() {
        return in_kernel();
    }
    // SAFETY: the caller's list.
    let entries = unsafe { std::slice::from_raw_parts(list, count) };
    let Some(wait) = PollWait::new(entries) else { return in_kernel() };
    loop {
        match wait.wait(deadline) {
            RetryDecision::Retry => {}
            RetryDecision::Return(EOPNOTSUPP) => return EOPNOTSUPP,
            RetryDecision::Return(_) => return poll(),
            RetryDecision::Block => return in_kernel(),
        }
        match poll() {
            0 => {}
            found => return found,
        }
    }
}

/// `poll` without descriptors.
fn sleep_by_poll(deadline: Nanos) -> isize {
    if let Some(_wait) = begin_wait() {
        sleep_until(deadline);
        return 0;
    }
    // SAFETY: an empty list.
    unsafe { poll_ms(std::ptr::null_mut(), 0, left_ms(deadline)) }
}

/// Returns the directions that `entries` ask for; None if they ask for other events, or are too
/// many.
fn watched(entries: &[pollfd]) -> Option<Vec<Watched>> {
    const READ: i16 = libc::POLLIN | libc::POLLRDHUP;
    if entries.len() > MAX_WATCHED {
        return None;
    }
    let mut all = Vec::with_capacity(entries.len());
    for &pollfd { fd, events, .. } in entries.iter().filter(|entry| entry.fd >= 0) {
        // A wait for a hang-up alone would end for readable data, again and again.
        let (read, write) = (events & libc::POLLIN != 0, events & libc::POLLOUT != 0);
        let is_hang_up_alone = !read && events & READ != 0;
        if events & !(READ | libc::POLLOUT) != 0 || is_hang_up_alone || !(read || write) {
            return None;
        }
        let pollable = fds::entry(fd)?.pollable();
        let sides = [(read, Direction::Read), (write, Direction::Write)];
        let asked = sides.into_iter().filter(|(is, _)| *is);
        all.extend(asked.map(|(_, direction)| Watched { pollable, fd, direction }));
    }
    (!all.is_empty()).then_some(all)
}

/// As [`wait_ready`], for any of several descriptors.
fn wait_ready_any(all: &[Watched], deadline: Nanos) -> RetryDecision {
    if deadline <= now() {
        return RetryDecision::Return(0);
    }
    let (Some(_wait), Some(sched)) = (begin_wait(), current_sched()) else {
        return RetryDecision::Block;
    };
    match wait_for_any(sched, all, deadline) {
        Ok(()) => RetryDecision::Retry,
        Err(e) => after_failed_wait(all.first().map_or(-1, |one| one.fd), &e),
    }
}

/// An epoll instance with the descriptors of one `poll`.
struct PollEpoll(c_int);

impl PollEpoll {
    /// Returns None if epoll does not support one of the descriptors.
    fn new(entries: &[pollfd]) -> Option<PollEpoll> {
        // SAFETY: makes a descriptor of our own.
        let fd = unsafe { syscall(libc::SYS_epoll_create1, [libc::EPOLL_CLOEXEC as usize]) };
        let epoll = (fd >= 0).then(|| PollEpoll(fd as c_int))?;
        for entry in entries.iter().filter(|entry| entry.fd >= 0) {
            // The bits are the same.
            let mut added =
                epoll.control(libc::EPOLL_CTL_ADD, entry.fd, entry.events as u16 as u32);
            if added == -(libc::EEXIST as isize) {
                // The list has the descriptor more than once: all events asked for.
                let same = entries.iter().filter(|other| other.fd == entry.fd);
                let events = same.fold(0, |all, other| all | other.events as u16 as u32);
                added = epoll.control(libc::EPOLL_CTL_MOD, entry.fd, events);
            }
            // A regular file (EPERM) has no events to wait for; `poll` has reported it as ready.
            if added != 0 && added != -(libc::EPERM as isize) {
                return None;
            }
        }
        Some(epoll)
    }

    fn control(&self, op: c_int, fd: c_int, events: u32) -> isize {
        let mut event = epoll_event { events, u64: 0 };
        let args = [self.0 as usize, op as usize, fd as usize, &raw mut event as usize];
        // SAFETY: a descriptor and an event of our own.
        unsafe { syscall(libc::SYS_epoll_ctl, args) }
    }
}

impl Drop for PollEpoll {
    fn drop(&mut self) {
        fds::before_close(self.0);
        // SAFETY: our own descriptor, which is not used any more.
        unsafe { syscall(libc::SYS_close, [self.0 as usize]) };
    }
}

interpose! {
    /// libc's function.
    fn epoll_wait(fd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int;
    on_goroutine => epoll_wait_for(fd, events, max, Timeout::from_ms(timeout))
}

interpose! {
    /// libc's function.
    fn epoll_pwait(fd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int,
        mask: *const sigset_t) -> c_int;
    on_goroutine => {
        if mask.is_null() {
            epoll_wait_for(fd, events, max, Timeout::from_ms(timeout))
        } else {
            let args = [fd as usize, events as usize, max as usize, timeout as usize];
            let [fd, events, max, timeout] = args;
            syscall(libc::SYS_epoll_pwait, [fd, events, max, timeout, mask as usize, MASK_BYTES])
        }
    }
}

/// `epoll_wait`.
unsafe fn epoll_wait_for(
    fd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: Timeout,
) -> isize {
    // SAFETY: the caller's array.
    let wait_ms = |ms: usize| unsafe {
        syscall(libc::SYS_epoll_pwait, [fd as usize, events as usize, max as usize, ms, 0, 8])
    };
    #[cfg(feature = "tokio")]
    let _attending = super::threads::driver_watch::attend_driver(fd);
    loop {
        let deadline = match (wait_ms(0), timeout) {
            (0, Timeout::Until(deadline)) => deadline,
            (found, _) => return found,
        };
        match wait_ready(fd, Direction::Read, deadline, None) {
            RetryDecision::Retry => {}
            RetryDecision::Return(EOPNOTSUPP) => return EOPNOTSUPP,
            RetryDecision::Return(_) => return wait_ms(0),
            RetryDecision::Block => return wait_ms(left_ms(deadline)),
        }
    }
}

interpose! {
    /// libc's function.
    fn select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
        timeout: *mut timeval) -> c_int;
    on_goroutine => {
        // The kernel accepts more than a second of microseconds. `Some(None)` is an invalid time.
        let time = timeout.as_ref().map(|t| {
            let (more, micros) = (t.tv_usec / 1_000_000, t.tv_usec % 1_000_000);
            nanos(&timespec { tv_sec: t.tv_sec.saturating_add(more), tv_nsec: micros * 1_000 })
        });
        if time == Some(None) {
            -(libc::EINVAL as isize)
        } else {
            let limit = Timeout::from_span(time.flatten());
            let result = select_for(count, [read, write, except], limit);
            // Linux writes the time left.
            if let Some(timeout) = timeout.as_mut() {
                let left = limit.left();
                timeout.tv_sec = (left / 1_000_000_000) as i64;
                timeout.tv_usec = (left % 1_000_000_000 / 1_000) as i64;
            }
            result
        }
    }
}

interpose! {
    /// libc's function.
    fn pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
        timeout: *const timespec, mask: *const sigset_t) -> c_int;
    on_goroutine => {
        // `Some(None)` is an invalid timeout; the kernel returns the error.
        let time = timeout.as_ref().map(nanos);
        if mask.is_null() && time != Some(None) {
            select_for(count, [read, write, except], Timeout::from_span(time.flatten()))
        } else {
            // The kernel may write to the timeout. The mask is passed with its size.
            let mut copy = timeout.as_ref().copied();
            let at = copy.as_mut().map_or(0, |t| &raw mut *t as usize);
            let mask = [mask as usize, MASK_BYTES];
            let sets = [read as usize, write as usize, except as usize];
            let [read, write, except] = sets;
            let mask = &raw const mask as usize;
            syscall(libc::SYS_pselect6, [count as usize, read, write, except, at, mask])
        }
    }
}

/// For each of the three sets: the event that a descriptor in it asks for, and the events by which
/// it is reported in the result. They are the kernel's.
const SET_EVENTS: [(i16, i16); 3] = [
    (libc::POLLIN, libc::POLLIN | libc::POLLRDNORM | libc::POLLHUP | libc::POLLERR),
    (libc::POLLOUT, libc::POLLOUT | libc::POLLWRNORM | libc::POLLERR),
    (libc::POLLPRI, libc::POLLPRI),
];

/// Makes the system call, with the time left.
unsafe fn select_in_kernel(count: c_int, sets: [*mut fd_set; 3], timeout: Timeout) -> isize {
    let [read, write, except] = sets.map(|set| set as usize);
    let left = timeout.left();
    let mut time =
        timespec { tv_sec: (left / 1_000_000_000) as i64, tv_nsec: (left % 1_000_000_000) as i64 };
    let time = if timeout == Timeout::Until(NEVER) { 0 } else { &raw mut time as usize };
    // SAFETY: the caller's sets, our own time.
    unsafe { syscall(libc::SYS_pselect6, [count as usize, read, write, except, time, 0]) }
}

/// Bits per word of a descriptor set.
const WORD_BITS: usize = u64::BITS as usize;

/// `select`, by [`poll_for`].
unsafe fn select_for(count: c_int, sets: [*mut fd_set; 3], timeout: Timeout) -> isize {
    if !(0..=MAX_SELECT_FDS as c_int).contains(&count) || !may_park() {
        // The kernel returns the error; or this is a signal handler, which must not allocate.
        // SAFETY: the caller's arguments.
        return unsafe { select_in_kernel(count, sets, timeout) };
    }
    // SAFETY: the caller's sets.
    let mut list = unsafe { poll_list(count as usize, sets) };
    // SAFETY: our own list.
    let found = unsafe { poll_for(list.as_mut_ptr(), list.len(), timeout) };
    if found < 0 {
        return found;
    }
    if list.iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
        return -(libc::EBADF as isize);
    }
    let mut answers = [[0u64; MAX_SELECT_FDS / WORD_BITS]; 3];
    let mut bits = 0;
    for entry in list {
        for (answer, (event, reported)) in answers.iter_mut().zip(SET_EVENTS) {
            if entry.events & event != 0 && entry.revents & reported != 0 {
                answer[entry.fd as usize / WORD_BITS] |= 1 << (entry.fd as usize % WORD_BITS);
                bits += 1;
            }
        }
    }
    if found > 0 && bits == 0 {
        // `poll` reports an event that `select` does not: a hang-up of a descriptor that is only in
        // the set of exceptions.
        // SAFETY: the caller's arguments.
        return unsafe { select_in_kernel(count, sets, timeout) };
    }
    for (set, answer) in sets.iter().zip(&answers).filter(|(set, _)| !set.is_null()) {
        // SAFETY: the caller's sets have `count` bits, in whole words.
        unsafe {
            set.cast::<u64>().copy_from(answer.as_ptr(), (count as usize).div_ceil(WORD_BITS))
        };
    }
    bits
}

/// Returns the entries of a `poll` for the descriptors in the sets.
///
/// # Safety
/// The sets are null or have `count` bits, in whole words. Two of them may be the same: hence no
/// slices.
unsafe fn poll_list(count: usize, sets: [*mut fd_set; 3]) -> Vec<pollfd> {
    let is_in = |set: *mut fd_set, fd: usize| {
        // SAFETY: the caller's contract.
        !set.is_null()
            && unsafe { set.cast::<u64>().add(fd / WORD_BITS).read() } >> (fd % WORD_BITS) & 1 != 0
    };
    let asked = |fd: usize| {
        let all = sets.iter().zip(SET_EVENTS).filter(|(set, _)| is_in(**set, fd));
        all.fold(0, |events, (_, (event, _))| events | event)
    };
    (0..count)
        .map(|fd| pollfd { fd: fd as c_int, events: asked(fd), revents: 0 })
        .filter(|entry| entry.events != 0)
        .collect()
}
