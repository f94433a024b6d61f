//! The poll traits of other crates, behind features: `tokio-io`, `futures-io`, `hyper`.
//!
//! All of them are made of the functions below, which work with any type that has an [`Fd`].

#![cfg_attr(
    not(any(feature = "tokio-io", feature = "futures-io", feature = "hyper")),
    allow(dead_code, unused_imports, unused_macros)
)]

use super::fd::Fd;
use super::{
    PipeReader, PipeWriter, ReadHalf, TcpStream, UnixReadHalf, UnixStream, UnixWriteHalf, WriteHalf,
};
use crate::sched::netpoll::pollable::Direction;
use crate::sys::syscalls;
#[cfg(feature = "futures-io")]
use std::io::IoSliceMut;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

/// Something that can be read. Returns how many bytes of `buf` were initialised.
fn poll_read(
    fd: &Fd,
    context: &mut Context<'_>,
    buf: &mut [MaybeUninit<u8>],
) -> Poll<io::Result<usize>> {
    let len = buf.len();
    fd.poll_io(Direction::Read, context, |raw| {
        fd.read_unless_drained(len, || syscalls::read_uninit(raw, &mut *buf))
    })
}

#[cfg(feature = "futures-io")]
fn poll_read_vectored(
    fd: &Fd,
    context: &mut Context<'_>,
    bufs: &mut [IoSliceMut<'_>],
) -> Poll<io::Result<usize>> {
    // What `readv` passes to the kernel, whose limit it is.
    let passed = bufs.len().min(libc::UIO_MAXIOV as usize);
    let len = bufs[..passed].iter().map(|buf| buf.len()).sum();
    fd.poll_io(Direction::Read, context, |raw| {
        fd.read_unless_drained(len, || syscalls::readv(raw, bufs))
    })
}

/// How a type is written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Socket,
    Pipe,
}

fn poll_write(
    fd: &Fd,
    kind: Kind,
    context: &mut Context<'_>,
    buf: &[u8],
) -> Poll<io::Result<usize>> {
    fd.poll_io(Direction::Write, context, |raw| match kind {
        Kind::Socket => syscalls::send(raw, buf),
        Kind::Pipe => syscalls::write(raw, buf),
    })
}

fn poll_write_vectored(
    fd: &Fd,
    kind: Kind,
    context: &mut Context<'_>,
    bufs: &[IoSlice<'_>],
) -> Poll<io::Result<usize>> {
    let bufs = super::fd::at_most_iov_max(bufs);
    fd.poll_io(Direction::Write, context, |raw| match kind {
        Kind::Socket => syscalls::send_vectored(raw, bufs),
        Kind::Pipe => syscalls::writev(raw, bufs),
    })
}

/// Ends the writing direction. Only the drop of a pipe does that, so nothing happens to a pipe. A
/// connection that the peer has reset has ended too.
fn poll_shutdown(fd: &Fd, kind: Kind) -> Poll<io::Result<()>> {
    if kind == Kind::Pipe {
        return Poll::Ready(Ok(()));
    }
    let result = fd.with(|socket| socket.shutdown(Shutdown::Write));
    Poll::Ready(match result {
        Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) => Ok(()),
        result => result,
    })
}

macro_rules! poll_read {
    ($($name:ty: |$this:ident| $fd:expr;)+) => {
        $(
            #[cfg(feature = "tokio-io")]
            impl tokio::io::AsyncRead for $name {
                fn poll_read(
                    self: Pin<&mut Self>,
                    context: &mut Context<'_>,
                    buf: &mut tokio::io::ReadBuf<'_>,
                ) -> Poll<io::Result<()>> {
                    let $this = self.get_mut();
                    // SAFETY: bytes are only written to it, never de-initialised.
                    let n = ready!(poll_read($fd, context, unsafe { buf.unfilled_mut() }))?;
                    // SAFETY: the kernel has written so many.
                    unsafe { buf.assume_init(n) };
                    buf.advance(n);
                    Poll::Ready(Ok(()))
                }
            }

            #[cfg(feature = "futures-io")]
            impl futures_io::AsyncRead for $name {
                fn poll_read(
                    self: Pin<&mut Self>,
                    context: &mut Context<'_>,
                    buf: &mut [u8],
                ) -> Poll<io::Result<usize>> {
                    let $this = self.get_mut();
                    // SAFETY: the same bytes; only initialised ones are written to them.
                    let buf = unsafe { &mut *(std::ptr::from_mut(buf) as *mut [MaybeUninit<u8>]) };
                    poll_read($fd, context, buf)
                }

                fn poll_read_vectored(
                    self: Pin<&mut Self>,
                    context: &mut Context<'_>,
                    bufs: &mut [IoSliceMut<'_>],
                ) -> Poll<io::Result<usize>> {
                    let $this = self.get_mut();
                    poll_read_vectored($fd, context, bufs)
                }
            }

            #[cfg(feature = "hyper")]
            impl hyper::rt::Read for $name {
                fn poll_read(
                    self: Pin<&mut Self>,
                    context: &mut Context<'_>,
                    mut buf: hyper::rt::ReadBufCursor<'_>,
                ) -> Poll<io::Result<()>> {
                    let $this = self.get_mut();
                    // SAFETY: bytes are only written to it, never de-initialised.
                    let n = ready!(poll_read($fd, context, unsafe { buf.as_mut() }))?;
                    // SAFETY: the kernel has written so many.
                    unsafe { buf.advance(n) };
                    Poll::Ready(Ok(()))
                }
            }
        )+
    };
}

macro_rules! poll_write {
    ($($name:ty: |$this:ident| $fd:expr, $kind:expr;)+) => {
        $(
            #[cfg(feature = "tokio-io")]
            impl tokio::io::AsyncWrite for $name {
                poll_write!(@methods $this, $fd, $kind, poll_shutdown);

                fn is_write_vectored(&self) -> bool {
                    true
                }
            }

            #[cfg(feature = "futures-io")]
            impl futures_io::AsyncWrite for $name {
                poll_write!(@methods $this, $fd, $kind, poll_close);
            }

            #[cfg(feature = "hyper")]
            impl hyper::rt::Write for $name {
                poll_write!(@methods $this, $fd, $kind, poll_shutdown);

                fn is_write_vectored(&self) -> bool {
                    true
                }
            }
        )+
    };
    (@methods $this:ident, $fd:expr, $kind:expr, $shutdown:ident) => {
        fn poll_write(
            self: Pin<&mut Self>,
            context: &mut Context<'_>,
            buf: &[u8],
        ) -> Poll<io::Result<usize>> {
            let $this = self.get_mut();
            poll_write($fd, $kind, context, buf)
        }

        fn poll_write_vectored(
            self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bufs: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            let $this = self.get_mut();
            poll_write_vectored($fd, $kind, context, bufs)
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn $shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            let $this = self.get_mut();
            poll_shutdown($fd, $kind)
        }
    };
}

poll_read! {
    TcpStream: |this| &this.fd;
    &TcpStream: |this| &this.fd;
    ReadHalf: |this| &this.stream().fd;
    UnixStream: |this| &this.fd;
    &UnixStream: |this| &this.fd;
    UnixReadHalf: |this| &this.stream().fd;
    PipeReader: |this| &this.fd;
    &PipeReader: |this| &this.fd;
}

poll_write! {
    TcpStream: |this| &this.fd, Kind::Socket;
    &TcpStream: |this| &this.fd, Kind::Socket;
    WriteHalf: |this| &this.stream().fd, Kind::Socket;
    UnixStream: |this| &this.fd, Kind::Socket;
    &UnixStream: |this| &this.fd, Kind::Socket;
    UnixWriteHalf: |this| &this.stream().fd, Kind::Socket;
    PipeWriter: |this| &this.fd, Kind::Pipe;
    &PipeWriter: |this| &this.fd, Kind::Pipe;
}
