//! A call of libc on a goroutine has the result that it has on a plain thread. Most tests here run
//! the same code on both and compare; what a plain thread does is the specification.
#![cfg(feature = "std")]

mod closes;
#[path = "../common/mod.rs"]
mod common;
mod connections;
mod datagrams;
mod futexes;
mod names;
mod polls;
mod reads;
mod threads;
mod writes;

use common::runtime;
use std::ffi::{c_int, c_void};
use std::fmt::Debug;
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::AtomicI32;
use std::thread;

/// Runs `f` on a plain thread and on a goroutine, and compares what it returns.
#[track_caller]
fn same_on_both<T: Debug + PartialEq + Send + 'static>(f: fn() -> T) -> T {
    let thread = thread::spawn(f).join().unwrap();
    for procs in [1, 2] {
        let goroutine = runtime(procs).run(f);
        assert_eq!(goroutine, thread, "a goroutine (left) and a thread (right), {procs} Ps");
    }
    thread
}

/// As [`same_on_both`], for code that waits for seconds and measures nothing of the process: on all
/// of them at the same time.
#[track_caller]
fn same_on_both_at_once<T: Debug + PartialEq + Send + 'static>(f: fn() -> T) -> T {
    let start = |procs| thread::spawn(move || runtime(procs).run(f));
    let (thread, goroutines) = (thread::spawn(f), [1, 2].map(start));
    let thread = thread.join().unwrap();
    for (goroutine, procs) in goroutines.into_iter().zip([1, 2]) {
        let goroutine = goroutine.join().unwrap();
        assert_eq!(goroutine, thread, "a goroutine (left) and a thread (right), {procs} Ps");
    }
    thread
}

/// Returns the result of a call, or the negated error number.
fn check(result: isize) -> isize {
    if result < 0 {
        -(std::io::Error::last_os_error().raw_os_error().unwrap() as isize)
    } else {
        result
    }
}

const NOTHING: isize = -(libc::EAGAIN as isize);

/// Returns a connected pair.
fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

/// Returns two sockets that are connected to each other.
fn udp() -> (UdpSocket, UdpSocket) {
    let [a, b] = std::array::from_fn(|_| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    a.connect(b.local_addr().unwrap()).unwrap();
    b.connect(a.local_addr().unwrap()).unwrap();
    (a, b)
}

fn set(fd: &impl AsRawFd, level: c_int, name: c_int, value: c_int) {
    let at = (&raw const value).cast();
    // SAFETY: a local variable.
    let rc =
        unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, at, size_of::<c_int>() as u32) };
    assert_eq!(rc, 0);
}

fn read(fd: &impl AsRawFd, buf: &mut [u8]) -> isize {
    // SAFETY: the caller's buffer.
    check(unsafe { libc::read(fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len()) })
}

fn recv(fd: &impl AsRawFd, buf: &mut [u8], flags: c_int) -> isize {
    // SAFETY: the caller's buffer.
    check(unsafe { libc::recv(fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len(), flags) })
}

fn write(fd: &impl AsRawFd, buf: &[u8]) -> isize {
    // SAFETY: the caller's buffer.
    check(unsafe { libc::write(fd.as_raw_fd(), buf.as_ptr().cast(), buf.len()) })
}

fn eventfd() -> OwnedFd {
    // SAFETY: returns a new descriptor, which has no other owner.
    unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, 0)) }
}

const LARGE: usize = 4 << 20;

/// Divides `bytes` into `count` buffers of different sizes.
fn uneven(bytes: &[u8], count: usize) -> Vec<libc::iovec> {
    let mut list = Vec::new();
    let mut rest = bytes;
    for i in 0..count {
        let len = if i + 1 == count { rest.len() } else { rest.len() / (count - i) / (1 + i % 3) };
        let (one, more) = rest.split_at(len);
        list.push(libc::iovec { iov_base: one.as_ptr() as *mut c_void, iov_len: len });
        rest = more;
    }
    list
}

/// Returns `LARGE` bytes in which a displaced byte is noticed.
fn pattern() -> &'static [u8] {
    static PATTERN: OnceLock<Vec<u8>> = OnceLock::new();
    PATTERN.get_or_init(|| (0..LARGE).map(|i| (i / 7 + i / 1_000) as u8).collect())
}

/// The thread to signal: it is in the runtime most of the time.
static BUSY: AtomicI32 = AtomicI32::new(0);
