//! The time limit for the beginning of a connection.
//!
//! hyper-util reads the first bytes of a connection to find out whether it is HTTP/2, and has no
//! time limit for that. hyper's own limits begin afterwards: that for the head of an HTTP/1
//! request, and the keep-alive of HTTP/2.

use hyper::rt::{Read, ReadBuf, ReadBufCursor, Write};
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use trefoil::time::{Sleep, sleep_async};

/// What a client of HTTP/2 sends first (RFC 9113, 3.4).
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A stream whose reads fail with `TimedOut` if its first bytes do not come in time: the whole
/// preface of HTTP/2, or the first byte that shows that it is not HTTP/2.
pub(crate) struct PrefaceLimit<I> {
    stream: I,
    /// How many bytes of the preface have come.
    matched: usize,
    /// The limit. None if the bytes have come, or if there is no limit.
    limit: Option<Sleep>,
}

impl<I> PrefaceLimit<I> {
    /// The time limit counts from now.
    pub(crate) fn new(stream: I, timeout: Option<Duration>) -> PrefaceLimit<I> {
        PrefaceLimit { stream, matched: 0, limit: timeout.map(sleep_async) }
    }

    /// Returns whether the limit ends with `bytes`, which follow those before.
    fn ends_with(&mut self, bytes: &[u8]) -> bool {
        let rest = &HTTP2_PREFACE[self.matched..];
        self.matched += bytes.len().min(rest.len());
        // End-of-file ends it, too.
        bytes.is_empty() || bytes.len() >= rest.len() || !rest.starts_with(bytes)
    }
}

impl<I: Read + Unpin> PrefaceLimit<I> {
    fn poll_read_first(
        &mut self,
        context: &mut Context<'_>,
        mut buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        // SAFETY: bytes are only written to it, never de-initialised.
        let mut own = ReadBuf::uninit(unsafe { buf.as_mut() });
        if Pin::new(&mut self.stream).poll_read(context, own.unfilled())?.is_pending() {
            if let Some(limit) = &mut self.limit {
                ready!(Pin::new(limit).poll(context));
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            return Poll::Pending;
        }
        let n = own.filled().len();
        if self.ends_with(own.filled()) {
            self.limit = None;
        }
        // SAFETY: the stream has initialised so many.
        unsafe { buf.advance(n) };
        Poll::Ready(Ok(()))
    }
}

impl<I: Read + Unpin> Read for PrefaceLimit<I> {
    #[inline]
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if self.limit.is_some() {
            return self.poll_read_first(context, buf);
        }
        Pin::new(&mut self.stream).poll_read(context, buf)
    }
}

impl<I: Write + Unpin> Write for PrefaceLimit<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bufs)
    }
}
