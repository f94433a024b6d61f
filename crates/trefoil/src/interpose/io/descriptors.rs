//! Calls that close, make or change a descriptor: the real functions, and updates of what is known
//! (`fds.rs`).

use super::simulated;
use super::sockets::note_low_water;
use crate::interpose::fds;
use crate::interpose::park::on_goroutine;
use crate::simnet;
use crate::sys::clock;
use crate::sys::lock;
use crate::sys::raw::{syscall, to_libc};
use libc::socklen_t;
use std::ffi::{c_int, c_uint, c_ulong, c_void};

interpose! {
    /// libc's function. Goroutines that wait for the descriptor stop waiting.
    fn close(fd: c_int) -> c_int;
    with real => {
        let is_simulated = forget_simulated(fd);
        let known = fds::before_close(fd);
        let rc = if is_simulated {
            to_libc(simnet::sockets::close_marked(fd)) as c_int
        } else {
            real(fd)
        };
        if known {
            fds::after_close(fd);
        }
        rc
    }
}

interpose! {
    /// libc's function.
    fn dup(fd: c_int) -> c_int;
    with real => {
        let rc = duplicate(fd, || real(fd));
        fds::after_open(rc);
        after_duplicate(fd, rc);
        rc
    }
}

/// A descriptor is about to be closed, which may belong to a simulation. Returns whether it is a
/// simulated socket.
#[inline(always)]
fn forget_simulated(fd: c_int) -> bool {
    (clock::has_simulations() || simnet::retired::has_any()) && forget_simulated_slow(fd)
}

#[cold]
fn forget_simulated_slow(fd: c_int) -> bool {
    if !may_forget() {
        return false;
    }
    let is_simulated = simulated::network().is_some_and(|network| network.before_close(fd));
    // Last: the caller may have been preempted before, and the number retired meanwhile.
    simnet::retired::note_close(fd);
    is_simulated
}

/// Returns whether descriptors that the caller closes may be forgotten: not in a child, whose
/// descriptors are its own, and not in a signal handler that interrupted code under a lock of the
/// runtime.
fn may_forget() -> bool {
    !fds::is_child() && !lock::holds_runtime_lock()
}

/// Returns whether the kernel has `close_range` and allows it.
fn may_close_range() -> bool {
    // SAFETY: passes no pointers, and closes nothing: the range is refused.
    let result = unsafe { syscall(libc::SYS_close_range, [1, 0, 0]) };
    result == -(libc::EINVAL as isize)
}

/// As [`forget_simulated`], for the descriptors from `first` to `last`. Returns whether there may be
/// simulated sockets among them.
fn forget_simulated_range(first: c_uint, last: c_uint) -> bool {
    let has_any = clock::has_simulations() || simnet::retired::has_any();
    if !has_any || !may_forget() {
        return false;
    }
    if let Some(network) = simulated::network() {
        network.before_close_range(first, last);
    }
    // Last, as in `forget_simulated_slow`.
    simnet::retired::note_close_range(first, last);
    true
}

/// Returns the result of `real`, which duplicates `fd`.
#[inline(always)]
fn duplicate(fd: c_int, real: impl FnOnce() -> c_int) -> c_int {
    if is_simulated(fd) {
        simnet::sockets::make_marked(|| real() as isize) as c_int
    } else {
        real()
    }
}

/// In a simulation: `fd` was duplicated as `rc`, unless that is an error.
#[inline(always)]
fn after_duplicate(fd: c_int, rc: c_int) {
    if let Some(network) = simulated::network()
        && !fds::is_child()
    {
        network.after_duplicate(fd, rc);
    }
}

/// Tells the simulated network, if there is one, about a new epoll instance or eventfd. Returns
/// `fd`, which may be −1.
#[inline(always)]
fn note_event_descriptor(fd: c_int) -> c_int {
    if fd >= 0
        && let Some(network) = simulated::network()
    {
        network.add_event_descriptor(fd);
    }
    fd
}

interpose! {
    /// libc's function.
    fn epoll_create(size: c_int) -> c_int;
    with real => note_event_descriptor(real(size))
}

interpose! {
    /// libc's function.
    fn epoll_create1(flags: c_int) -> c_int;
    with real => note_event_descriptor(real(flags))
}

interpose! {
    /// libc's function.
    fn eventfd(count: c_uint, flags: c_int) -> c_int;
    with real => note_event_descriptor(real(count, flags))
}

/// Returns whether `dup3` closes `to`: it does not if it fails.
fn closes_target(from: c_int, to: c_int, flags: c_int) -> bool {
    // SAFETY: passes no pointers.
    let is_open =
        || unsafe { syscall(libc::SYS_fcntl, [from as usize, libc::F_GETFD as usize]) >= 0 };
    from != to && flags & !libc::O_CLOEXEC == 0 && is_open()
}

/// Returns whether the descriptor is a simulated socket of the caller's simulation.
#[inline(always)]
fn is_simulated(fd: c_int) -> bool {
    clock::has_simulations() && is_simulated_slow(fd)
}

#[cold]
fn is_simulated_slow(fd: c_int) -> bool {
    on_goroutine()
        && simnet::here().is_some_and(|network| network.has_socket(fd))
        && !fds::is_child()
}

/// `dup3`, or `dup2` without flags; `real` is the real function.
fn duplicate_to(from: c_int, to: c_int, flags: c_int, real: impl FnOnce() -> c_int) -> c_int {
    let closes = closes_target(from, to, flags);
    let replaces_simulated = closes && is_simulated(to);
    let known = closes && fds::before_close(to);
    let rc = if replaces_simulated {
        to_libc(simnet::sockets::replace_marked(from, to, flags)) as c_int
    } else {
        real()
    };
    if known {
        fds::after_close(to);
    }
    after_duplicate(from, rc);
    rc
}

interpose! {
    /// libc's function.
    fn dup2(from: c_int, to: c_int) -> c_int;
    with real => duplicate_to(from, to, 0, || real(from, to))
}

interpose! {
    /// libc's function.
    fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int;
    with real => duplicate_to(from, to, flags, || real(from, to, flags))
}

/// Updates what is known, after `fcntl` has returned `rc`: for `F_SETFL`, and for the commands that
/// make a descriptor.
fn after_fcntl(fd: c_int, command: c_int, arg: usize, rc: c_int) {
    match command {
        libc::F_SETFL if arg as c_int & libc::O_NONBLOCK != 0 => fds::invalidate_mode_cache(),
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
            fds::after_open(rc);
            after_duplicate(fd, rc);
        }
        _ => {}
    }
}

/// `fcntl`; `real` is the real function.
fn fcntl_by(fd: c_int, command: c_int, arg: usize, real: impl FnOnce() -> c_int) -> c_int {
    let rc = match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => duplicate(fd, real),
        _ => real(),
    };
    after_fcntl(fd, command, arg, rc);
    rc
}

interpose! {
    /// libc's function. Its optional third argument is in the register of a third argument.
    fn fcntl(fd: c_int, command: c_int, arg: usize) -> c_int;
    with real => {
        fcntl_by(fd, command, arg, || real(fd, command, arg))
    }
}

interpose! {
    /// libc's function, by its other name.
    fn fcntl64(fd: c_int, command: c_int, arg: usize) -> c_int;
    with real => {
        fcntl_by(fd, command, arg, || real(fd, command, arg))
    }
}

interpose! {
    /// libc's function.
    fn ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int;
    with real => {
        let rc = real(fd, request, arg);
        if request as u32 == libc::FIONBIO as u32 {
            fds::invalidate_mode_cache();
        }
        rc
    }
}

interpose! {
    /// libc's function.
    fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void,
        len: socklen_t) -> c_int;
    with real => {
        if let Some(network) = simulated::network()
            && let Some(result) = network.set_option(fd, (level, name), value.cast(), len)
        {
            return to_libc(result) as c_int;
        }
        let rc = real(fd, level, name, value, len);
        if level == libc::SOL_SOCKET {
            match name {
                libc::SO_RCVTIMEO | libc::SO_SNDTIMEO => fds::invalidate_mode_cache(),
                libc::SO_RCVLOWAT => note_low_water(),
                _ => {}
            }
        }
        rc
    }
}

interpose! {
    /// libc's function.
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    with real => {
        let simulated = simulated::network().and_then(|network| network.socket(domain, kind));
        let rc = match simulated {
            Some(result) => to_libc(result) as c_int,
            None => real(domain, kind, protocol),
        };
        fds::after_open(rc);
        rc
    }
}

interpose! {
    /// libc's function.
    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    with real => {
        // With a flag it closes nothing, or only what will be this thread's alone.
        if flags != 0 || !may_close_range() {
            return real(first, last, flags);
        }
        let is_simulated = forget_simulated_range(first, last);
        let known = fds::before_close_range(first, last);
        let rc = if is_simulated {
            let close = || real(first, last, flags) as isize;
            simnet::sockets::close_marked_range(first, last, close) as c_int
        } else {
            real(first, last, flags)
        };
        if known {
            fds::after_close_range(first, last);
        }
        rc
    }
}
