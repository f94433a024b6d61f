//! Waiting for one of several descriptors: `poll`, `select`, `epoll_wait` and their kin, with which other crates
//! write event loops.
//!
//! Descriptors are waited for each in its own place, all of them at once. What a place does not know (urgent data, a
//! hang-up alone) is waited for through an epoll of the call's own, which is a descriptor too. A call that changes the thread's signal mask (`ppoll`, `pselect`, `epoll_pwait` with a mask) is the
//! kernel's business: the thread blocks, and loses its P.

use super::io::{Then, poll_now, wait_ready};
use super::sleep::nanos;
use super::{begin_wait, fds, may_park};
use crate::runtime;
use crate::sched::netpoll::pollable::Direction;
use crate::sched::netpoll::wait_any::{Watched, wait_for_any};
use crate::sys::clock::{self, NEVER, Nanos, now};
use crate::sys::raw::syscall;
use crate::time::sleep_until_nanos;
use libc::{c_int, c_ulong, epoll_event, fd_set, pollfd, sigset_t, timespec, timeval};

/// The kernel's signal mask.
const MASK_BYTES: usize = size_of::<u64>();
/// Descriptors that `select` is asked for, at most: longer sets than `fd_set` are the kernel's, which knows how much of
/// them to look at.
const MOST: usize = libc::FD_SETSIZE;
/// Descriptors of a `poll` that are waited for each in its own place, at most: the runtime goes through all of them
/// without a pause.
const MOST_WATCHED: usize = 1024;

fn after_ms(ms: c_int) -> Nanos {
    if ms < 0 { NEVER } else { clock::after_nanos(ms as u64 * 1_000_000) }
}

fn after(span: Option<Nanos>) -> Nanos {
    span.map_or(NEVER, clock::after_nanos)
}

/// What is left, as the kernel's calls take it.
fn left_ms(until: Nanos) -> usize {
    match until {
        NEVER => usize::MAX,
        _ => until.saturating_sub(now()).div_ceil(1_000_000).min(i32::MAX as u64) as usize,
    }
}

door! {
    /// libc's function.
    POLL = poll(list: *mut pollfd, count: c_ulong, timeout: c_int) -> c_int,
    poll_until(list, count as usize, after_ms(timeout), timeout == 0)
}

door! {
    /// libc's function.
    PPOLL = ppoll(list: *mut pollfd, count: c_ulong, timeout: *const timespec,
        mask: *const sigset_t) -> c_int,
    {
        let time = timeout.as_ref().map(nanos);
        if mask.is_null() && time != Some(None) {
            let span = time.flatten();
            poll_until(list, count as usize, after(span), span == Some(0))
        } else {
            // The thread's mask changes with it: the kernel's business. It may write to the timeout.
            let mut copy = timeout.as_ref().copied();
            let at = copy.as_mut().map_or(0, |t| &raw mut *t as usize);
            let mask = mask as usize;
            syscall(libc::SYS_ppoll, [list as usize, count as usize, at, mask, MASK_BYTES])
        }
    }
}

unsafe fn poll_until(list: *mut pollfd, count: usize, until: Nanos, at_once: bool) -> isize {
    // SAFETY: the caller's list.
    let look = || unsafe { poll_now(list, count) };
    let first = look();
    if first != 0 || at_once {
        return first;
    }
    if count == 0 {
        if let Some(_wait) = begin_wait() {
            sleep_until_nanos(until);
            return 0;
        }
        // SAFETY: an empty list.
        return unsafe { syscall(libc::SYS_poll, [0, 0, left_ms(until)]) };
    }
    // SAFETY: the caller's list.
    let in_kernel = || unsafe { syscall(libc::SYS_poll, [list as usize, count, left_ms(until)]) };
    // In a signal handler nothing is allocated.
    if !may_park() {
        return in_kernel();
    }
    // SAFETY: the caller's list.
    let entries = unsafe { std::slice::from_raw_parts(list, count) };
    let several = match watched(entries) {
        Some(all) => Err(all),
        None => match Several::of(entries) {
            Some(several) => Ok(several),
            None => return in_kernel(),
        },
    };
    loop {
        let then = match &several {
            Err(all) => match all[..] {
                [Watched { fd, direction, .. }] => wait_ready(fd, direction, until, None),
                _ => wait_ready_any(all, until),
            },
            Ok(several) => wait_ready(several.0, Direction::Read, until, None),
        };
        match then {
            Then::TryAgain => {}
            Then::Return(_) => return look(),
            Then::Block => return in_kernel(),
        }
        match look() {
            0 => {}
            found => return found,
        }
    }
}

/// The directions that `entries` ask for. None: they ask for something else.
fn watched(entries: &[pollfd]) -> Option<Vec<Watched>> {
    const READ: i16 = libc::POLLIN | libc::POLLRDHUP;
    if entries.len() > MOST_WATCHED {
        return None;
    }
    let mut all = Vec::with_capacity(entries.len());
    for &pollfd { fd, events, .. } in entries.iter().filter(|entry| entry.fd >= 0) {
        // Readable data is an event for whoever waits for a hang-up alone, and would be one again and again.
        let (read, write) = (events & libc::POLLIN != 0, events & libc::POLLOUT != 0);
        let is_hang_up_alone = !read && events & READ != 0;
        if events & !(READ | libc::POLLOUT) != 0 || is_hang_up_alone || !(read || write) {
            return None;
        }
        let pollable = fds::slot(fd)?.pollable();
        let sides = [(read, Direction::Read), (write, Direction::Write)];
        let asked = sides.into_iter().filter(|(is, _)| *is);
        all.extend(asked.map(|(_, direction)| Watched { pollable, fd, direction }));
    }
    (!all.is_empty()).then_some(all)
}

/// As [`wait_ready`], for any of several.
fn wait_ready_any(all: &[Watched], until: Nanos) -> Then {
    if until <= now() {
        return Then::Return(0);
    }
    let (Some(_wait), Ok(sched)) = (begin_wait(), runtime::current_sched()) else {
        return Then::Block;
    };
    match wait_for_any(sched, all, until) {
        Ok(()) => Then::TryAgain,
        Err(_) => Then::Block,
    }
}

/// An epoll with the descriptors of one `poll`.
struct Several(c_int);

impl Several {
    /// None: one of them cannot be waited for by it.
    fn of(entries: &[pollfd]) -> Option<Several> {
        // SAFETY: makes a descriptor of our own, and adds to it.
        unsafe {
            let fd = syscall(libc::SYS_epoll_create1, [libc::EPOLL_CLOEXEC as usize]);
            let epoll = (fd >= 0).then(|| Several(fd as c_int))?;
            for entry in entries.iter().filter(|entry| entry.fd >= 0) {
                // The bits are the same.
                let mut event = epoll_event { events: entry.events as u16 as u32, u64: 0 };
                let tell = |op: c_int, event: &mut epoll_event| {
                    let at = std::ptr::from_mut(event) as usize;
                    let args = [epoll.0 as usize, op as usize, entry.fd as usize, at];
                    syscall(libc::SYS_epoll_ctl, args)
                };
                let mut told = tell(libc::EPOLL_CTL_ADD, &mut event);
                if told == -(libc::EEXIST as isize) {
                    // It is named more than once: for all that is asked of it.
                    let same = entries.iter().filter(|other| other.fd == entry.fd);
                    event.events = same.fold(0, |all, other| all | other.events as u16 as u32);
                    told = tell(libc::EPOLL_CTL_MOD, &mut event);
                }
                // A regular file has no events to wait for; `poll` has said so.
                if told != 0 && told != -(libc::EPERM as isize) {
                    return None;
                }
            }
            Some(epoll)
        }
    }
}

impl Drop for Several {
    fn drop(&mut self) {
        fds::closing(self.0);
        // SAFETY: ours.
        unsafe { syscall(libc::SYS_close, [self.0 as usize]) };
    }
}

door! {
    /// libc's function.
    EPOLL_WAIT = epoll_wait(fd: c_int, events: *mut epoll_event, max: c_int,
        timeout: c_int) -> c_int,
    epoll_until(fd, events, max, after_ms(timeout), timeout == 0)
}

door! {
    /// libc's function.
    EPOLL_PWAIT = epoll_pwait(fd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int,
        mask: *const sigset_t) -> c_int,
    {
        if mask.is_null() {
            epoll_until(fd, events, max, after_ms(timeout), timeout == 0)
        } else {
            let args = [fd as usize, events as usize, max as usize, timeout as usize];
            let [fd, events, max, timeout] = args;
            syscall(libc::SYS_epoll_pwait, [fd, events, max, timeout, mask as usize, MASK_BYTES])
        }
    }
}

unsafe fn epoll_until(
    fd: c_int,
    events: *mut epoll_event,
    max: c_int,
    until: Nanos,
    at_once: bool,
) -> isize {
    // SAFETY: the caller's array.
    let look = |ms: usize| unsafe {
        syscall(libc::SYS_epoll_wait, [fd as usize, events as usize, max as usize, ms])
    };
    loop {
        match look(0) {
            0 if !at_once => match wait_ready(fd, Direction::Read, until, None) {
                Then::TryAgain => {}
                Then::Return(_) => return look(0),
                Then::Block => return look(left_ms(until)),
            },
            found => return found,
        }
    }
}

door! {
    /// libc's function.
    SELECT = select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
        timeout: *mut timeval) -> c_int,
    {
        // As the kernel does it: more than a second of microseconds is a time, too.
        let time = timeout.as_ref().map(|t| {
            let (more, micros) = (t.tv_usec / 1_000_000, t.tv_usec % 1_000_000);
            nanos(&timespec { tv_sec: t.tv_sec.saturating_add(more), tv_nsec: micros * 1_000 })
        });
        if time == Some(None) {
            -(libc::EINVAL as isize)
        } else {
            let span = time.flatten();
            let until = after(span);
            let result = select_until(count, [read, write, except], until, span == Some(0));
            // As Linux does: what is left of it.
            if let Some(timeout) = timeout.as_mut() {
                let left = until.saturating_sub(now());
                timeout.tv_sec = (left / 1_000_000_000) as i64;
                timeout.tv_usec = (left % 1_000_000_000 / 1_000) as i64;
            }
            result
        }
    }
}

door! {
    /// libc's function.
    PSELECT = pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
        timeout: *const timespec, mask: *const sigset_t) -> c_int,
    {
        let time = timeout.as_ref().map(nanos);
        if mask.is_null() && time != Some(None) {
            let span = time.flatten();
            select_until(count, [read, write, except], after(span), span == Some(0))
        } else {
            // It may write to the timeout. The mask goes in with its size.
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

/// What is asked of a descriptor in each of the three sets, and which answers mean yes. As the kernel has it.
const ASKED: [(i16, i16); 3] = [
    (libc::POLLIN, libc::POLLIN | libc::POLLRDNORM | libc::POLLHUP | libc::POLLERR),
    (libc::POLLOUT, libc::POLLOUT | libc::POLLWRNORM | libc::POLLERR),
    (libc::POLLPRI, libc::POLLPRI),
];

/// The kernel's own, with what is left of the time.
unsafe fn select_by_kernel(count: c_int, sets: [*mut fd_set; 3], until: Nanos) -> isize {
    let [read, write, except] = sets.map(|set| set as usize);
    let left = until.saturating_sub(now());
    let mut time =
        timespec { tv_sec: (left / 1_000_000_000) as i64, tv_nsec: (left % 1_000_000_000) as i64 };
    let time = if until == NEVER { 0 } else { &raw mut time as usize };
    // SAFETY: the caller's sets, our own time.
    unsafe { syscall(libc::SYS_pselect6, [count as usize, read, write, except, time, 0]) }
}

/// `select` by `poll`.
unsafe fn select_until(count: c_int, sets: [*mut fd_set; 3], until: Nanos, at_once: bool) -> isize {
    const BITS: usize = u64::BITS as usize;
    if !(0..=MOST as c_int).contains(&count) || !may_park() {
        // Its own errors; or a signal handler, where nothing is allocated.
        // SAFETY: the caller's arguments.
        return unsafe { select_by_kernel(count, sets, until) };
    }
    let count = count as usize;
    // Two of the sets may be one and the same: hence no slices.
    let is_in = |set: *mut fd_set, fd: usize| {
        // SAFETY: the caller's sets have `count` bits, in whole words.
        !set.is_null() && unsafe { set.cast::<u64>().add(fd / BITS).read() } >> (fd % BITS) & 1 != 0
    };
    let asked = |fd: usize| {
        let all = sets.iter().zip(ASKED).filter(|(set, _)| is_in(**set, fd));
        all.fold(0, |events, (_, (event, _))| events | event)
    };
    let mut list: Vec<pollfd> = (0..count)
        .map(|fd| pollfd { fd: fd as c_int, events: asked(fd), revents: 0 })
        .filter(|entry| entry.events != 0)
        .collect();
    // SAFETY: our own list.
    let found = unsafe { poll_until(list.as_mut_ptr(), list.len(), until, at_once) };
    if found < 0 {
        return found;
    }
    if list.iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
        return -(libc::EBADF as isize);
    }
    let mut answers = [[0u64; MOST / BITS]; 3];
    let mut bits = 0;
    for entry in list {
        for (answer, (event, yes)) in answers.iter_mut().zip(ASKED) {
            if entry.events & event != 0 && entry.revents & yes != 0 {
                answer[entry.fd as usize / BITS] |= 1 << (entry.fd as usize % BITS);
                bits += 1;
            }
        }
    }
    if found > 0 && bits == 0 {
        // Something of which `poll` tells and `select` does not: a hang-up where only exceptions were asked for.
        // SAFETY: the caller's arguments.
        return unsafe { select_by_kernel(count as c_int, sets, until) };
    }
    for (set, answer) in sets.iter().zip(&answers).filter(|(set, _)| !set.is_null()) {
        // SAFETY: as above.
        unsafe { set.cast::<u64>().copy_from(answer.as_ptr(), count.div_ceil(BITS)) };
    }
    bits
}
