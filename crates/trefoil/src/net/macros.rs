//! Macros that define the methods which several types of `net` have in common.
//!
//! They expect a struct with a field `fd: Arc<Fd>`.

/// Methods and traits of every socket type: closing, contexts, and the conversions from and to std.
macro_rules! socket {
    ($name:ident, $std:ty) => {
        impl $name {
            /// Closes the socket for all goroutines that use it.
            ///
            /// Calls that wait on this socket fail, and later calls fail with the same error. When
            /// the last call has returned, the connection ends: the peer reads end-of-file or gets
            /// a reset, a listener refuses connections, and ports and names become free. Halves of
            /// the same stream are closed too; sockets made by [`try_clone`](Self::try_clone) stay
            /// open.
            ///
            /// The number of the descriptor stays in use until the socket is dropped. If the
            /// descriptor was borrowed before (`as_fd`), `close` must not take it away from the
            /// borrower: it calls `shutdown(2)` for both directions instead, which also ends the
            /// connection for clones. Ports and names become free when the socket is dropped.
            ///
            /// std has no such method: there, only the other side can end a read or an accept that
            /// waits.
            ///
            /// # Errors
            /// [`NotConnected`](io::ErrorKind::NotConnected) if the socket is closed already.
            ///
            /// # Examples
            /// The example uses a `UnixStream`. Every socket type behaves the same.
            /// ```
            /// use std::io::{ErrorKind, Read};
            /// use std::sync::Arc;
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (one, _other) = UnixStream::pair().unwrap();
            ///     let one = Arc::new(one);
            ///     let reader = one.clone();
            ///     let read = trefoil::go(move || (&*reader).read(&mut [0; 8]));
            ///     one.close().unwrap();
            ///     let error = read.join().unwrap().unwrap_err();
            ///     assert_eq!(error.kind(), ErrorKind::NotConnected);
            ///     assert!(one.close().is_err(), "it is closed already");
            /// });
            /// ```
            pub fn close(&self) -> io::Result<()> {
                self.fd.close()
            }

            /// Ends calls on this socket with an error when `ctx` is done.
            ///
            /// This applies to calls that wait at that moment and to later calls, until the caller
            /// drops the guard. Then the socket can be used as before. If `ctx` is done already,
            /// calls fail from now on.
            ///
            /// The error wraps the [`ContextError`](crate::context::ContextError), which
            /// [`io::Error::get_ref`] returns. Its kind is [`TimedOut`](io::ErrorKind::TimedOut) if
            /// the context's deadline has passed and [`Other`](io::ErrorKind::Other) if the context
            /// was cancelled.
            ///
            /// Each guard costs a goroutine, which waits for the context.
            ///
            /// # Panics
            /// Panics if no memory is left for that goroutine.
            ///
            /// # Examples
            /// ```
            /// use std::io::Read;
            /// use trefoil::context::Context;
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (mut one, _other) = UnixStream::pair().unwrap();
            ///     let (ctx, cancel) = Context::background().with_cancel();
            ///     let _guard = one.cancel_on(&ctx);
            ///     trefoil::go(move || cancel.cancel());
            ///     let error = one.read(&mut [0; 8]).unwrap_err();
            ///     assert_eq!(error.to_string(), "context canceled");
            /// });
            /// ```
            pub fn cancel_on(&self, ctx: &crate::context::Context) -> crate::net::CancelGuard {
                crate::net::CancelGuard::new(self.fd.clone(), ctx)
            }

            /// Returns another handle to the same socket.
            ///
            /// The clone has a descriptor of its own: it has its own deadlines and timeouts, and it
            /// stays open when this handle is closed. To share one handle, use a reference or an
            /// `Arc`.
            ///
            /// # Errors
            /// The OS error `EMFILE` or `ENFILE` if no descriptor is left, and
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use std::io::{Read, Write};
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (one, mut other) = UnixStream::pair().unwrap();
            ///     let mut clone = one.try_clone().unwrap();
            ///     one.close().unwrap();
            ///     clone.write_all(b"open").unwrap();
            ///     let mut bytes = [0; 4];
            ///     other.read_exact(&mut bytes).unwrap();
            ///     assert_eq!(&bytes, b"open");
            /// });
            /// ```
            pub fn try_clone(&self) -> io::Result<$name> {
                Ok($name { fd: Arc::new(self.fd.try_clone()?) })
            }

            /// Returns the error that is pending on the socket (`SO_ERROR`) and clears it.
            ///
            /// A pending error is one that the kernel received outside of a call, such as a reset
            /// by the other side.
            ///
            /// # Errors
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use trefoil::net::UdpSocket;
            ///
            /// trefoil::run(|| {
            ///     let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            ///     assert!(socket.take_error().unwrap().is_none());
            /// });
            /// ```
            pub fn take_error(&self) -> io::Result<Option<io::Error>> {
                self.fd.with(|s| s.take_error())
            }

            /// Converts std's socket into one that parks the goroutine.
            ///
            /// The descriptor becomes non-blocking. That also holds for clones of the std socket,
            /// because they share the open file description.
            ///
            /// # Errors
            /// The OS error of `ioctl(FIONBIO)` if the descriptor cannot be made non-blocking,
            /// which does not happen with sockets.
            ///
            /// # Examples
            /// ```
            /// use trefoil::net::UdpSocket;
            ///
            /// let plain = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            /// let address = plain.local_addr().unwrap();
            /// trefoil::run(move || {
            ///     let socket = UdpSocket::from_std(plain).unwrap();
            ///     socket.send_to(b"to itself", address).unwrap();
            ///     assert_eq!(socket.recv(&mut [0; 16]).unwrap(), 9);
            /// });
            /// ```
            pub fn from_std(socket: $std) -> io::Result<$name> {
                socket.set_nonblocking(true)?;
                Ok($name { fd: Arc::new(Fd::new(socket.into())) })
            }

            /// Converts the socket into std's, which blocks its thread again.
            ///
            /// The descriptor becomes blocking, unless
            /// [`set_nonblocking`](Self::set_nonblocking) was set.
            ///
            /// # Errors
            /// [`NotConnected`](io::ErrorKind::NotConnected) if the socket was closed, and
            /// [`ResourceBusy`](io::ErrorKind::ResourceBusy) if another half of it, a
            /// [`CancelGuard`](crate::net::CancelGuard), or a socket made by
            /// [`try_clone`](Self::try_clone) is alive. (A clone shares the open file description,
            /// so it would become blocking, too.) The socket is dropped then.
            ///
            /// # Examples
            /// ```
            /// use trefoil::net::UdpSocket;
            ///
            /// let plain: std::net::UdpSocket = trefoil::run(|| {
            ///     let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            ///     socket.into_std().unwrap()
            /// });
            /// assert!(plain.local_addr().unwrap().ip().is_loopback());
            /// ```
            pub fn into_std(self) -> io::Result<$std> {
                let fd = Arc::into_inner(self.fd).ok_or_else(|| {
                    io::Error::new(
                        io::ErrorKind::ResourceBusy,
                        "another half or a CancelGuard is alive",
                    )
                })?;
                let stays_nonblocking = fd.refuses_to_wait();
                let socket = <$std>::from(fd.into_owned()?);
                socket.set_nonblocking(stays_nonblocking)?;
                Ok(socket)
            }

            /// Sets whether calls that would wait fail with
            /// [`WouldBlock`](io::ErrorKind::WouldBlock) instead, like std's method.
            ///
            /// The default is `false`: a call parks the goroutine. The setting belongs to this
            /// handle and its halves, not to clones. It applies to later calls of goroutines and
            /// threads. Async methods (`…_async`, `readable`, `writable`, the poll traits) wait
            /// nevertheless: their task is what the caller would do meanwhile.
            ///
            /// # Errors
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use std::io::ErrorKind;
            /// use trefoil::net::UdpSocket;
            ///
            /// trefoil::run(|| {
            ///     let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            ///     socket.set_nonblocking(true).unwrap();
            ///     let error = socket.recv(&mut [0; 16]).unwrap_err();
            ///     assert_eq!(error.kind(), ErrorKind::WouldBlock);
            /// });
            /// ```
            pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
                self.fd.set_refuses_to_wait(nonblocking)
            }
        }

        /// Converts as `from_std` does.
        ///
        /// # Panics
        /// Panics if the descriptor cannot be made non-blocking. `from_std` returns an error
        /// instead.
        impl From<$std> for $name {
            fn from(socket: $std) -> $name {
                $name::from_std(socket).expect("a socket can be made non-blocking")
            }
        }

        /// Borrows the descriptor, which is non-blocking.
        ///
        /// It is valid until the socket is dropped, also after `close`. From the first borrow on,
        /// `close` ends the connection by `shutdown(2)`.
        impl AsFd for $name {
            fn as_fd(&self) -> BorrowedFd<'_> {
                self.fd.borrow()
            }
        }

        /// Returns the number of the descriptor, which is non-blocking.
        ///
        /// The number is valid until the socket is dropped. After `close` it may refer to another
        /// socket, which is not connected.
        impl AsRawFd for $name {
            fn as_raw_fd(&self) -> RawFd {
                self.fd.raw_for_user()
            }
        }

        /// Converts a descriptor as `from_std` does.
        ///
        /// # Errors
        /// The OS error of `ioctl(FIONBIO)` if the descriptor cannot be made non-blocking, which
        /// does not happen with sockets. What is not a socket of this type fails later.
        impl TryFrom<OwnedFd> for $name {
            type Error = io::Error;

            fn try_from(fd: OwnedFd) -> io::Result<$name> {
                $name::from_std(<$std>::from(fd))
            }
        }

        /// Converts as `into_std` does.
        ///
        /// # Errors
        /// Those of `into_std`.
        impl TryFrom<$name> for OwnedFd {
            type Error = io::Error;

            fn try_from(socket: $name) -> io::Result<OwnedFd> {
                Ok(socket.into_std()?.into())
            }
        }

        /// Converts as `into_std` does: the descriptor becomes blocking, and the caller has to
        /// close it.
        ///
        /// # Panics
        /// Panics if the socket was closed, or if another half of it, a `CancelGuard` or a clone is
        /// alive. `into_std` returns an error instead.
        impl IntoRawFd for $name {
            fn into_raw_fd(self) -> RawFd {
                self.into_std().expect("a socket that is open and not shared").into_raw_fd()
            }
        }

        /// Shows the addresses and the descriptor, as std's socket does. A closed socket has no
        /// addresses.
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.fd.call() {
                    Ok(call) => crate::net::fd::borrow_as_std(call.fd(), |socket: &$std| {
                        fmt::Debug::fmt(socket, f)
                    }),
                    Err(_) => f
                        .debug_struct(stringify!($name))
                        .field("fd", &self.fd.as_raw_fd())
                        .field("closed", &true)
                        .finish(),
                }
            }
        }
    };
}
pub(super) use socket;

/// Deadlines and timeouts of a socket that reads and writes.
macro_rules! deadlines {
    ($name:ident) => {
        impl $name {
            /// Sets the time at which reads and receives fail.
            ///
            /// A call that is not done at `deadline` fails with
            /// [`TimedOut`](io::ErrorKind::TimedOut). This applies to calls that wait now and to
            /// later calls, until the caller sets another deadline. After the deadline calls fail
            /// at once, even if data is available. With `None`, the default, there is no deadline.
            ///
            /// This is Go's `SetReadDeadline`. Use it to limit a whole exchange; use
            /// [`set_read_timeout`](Self::set_read_timeout) to limit each call.
            ///
            /// # Errors
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use std::io::{ErrorKind, Read, Write};
            /// use std::time::{Duration, Instant};
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (mut one, mut other) = UnixStream::pair().unwrap();
            ///     one.set_read_deadline(Some(Instant::now() + Duration::from_millis(2))).unwrap();
            ///     let error = one.read(&mut [0; 8]).unwrap_err();
            ///     assert_eq!(error.kind(), ErrorKind::TimedOut);
            ///
            ///     one.set_read_deadline(None).unwrap();
            ///     other.write_all(b"late").unwrap();
            ///     assert_eq!(one.read(&mut [0; 8]).unwrap(), 4);
            /// });
            /// ```
            pub fn set_read_deadline(&self, deadline: Option<Instant>) -> io::Result<()> {
                self.fd.set_deadline(Direction::Read, deadline)
            }

            /// Sets the time at which writes and sends fail.
            ///
            /// Everything that [`set_read_deadline`](Self::set_read_deadline) says about reads
            /// holds here for writes.
            ///
            /// # Errors
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use std::io::{ErrorKind, Write};
            /// use std::time::Instant;
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (mut one, _other) = UnixStream::pair().unwrap();
            ///     one.set_write_deadline(Some(Instant::now())).unwrap();
            ///     let error = one.write(b"too late").unwrap_err();
            ///     assert_eq!(error.kind(), ErrorKind::TimedOut);
            /// });
            /// ```
            pub fn set_write_deadline(&self, deadline: Option<Instant>) -> io::Result<()> {
                self.fd.set_deadline(Direction::Write, deadline)
            }

            /// Sets how long each read or receive may wait.
            ///
            /// The timeout starts when a call begins to wait; a call that need not wait never fails
            /// by it. With `None`, the default, calls wait without a limit. A new timeout applies
            /// to calls that begin later.
            ///
            /// For the poll traits (`AsyncRead`), a call lasts until a poll is ready. If a task
            /// gives up a call and begins another before the timeout has ended, the timeout
            /// continues. It begins anew after that, and if another task begins a call.
            ///
            /// Unlike std's method, it belongs to this handle, not to the kernel's socket. After
            /// the timeout the error is always [`TimedOut`](io::ErrorKind::TimedOut), never
            /// [`WouldBlock`](io::ErrorKind::WouldBlock).
            ///
            /// # Errors
            /// [`InvalidInput`](io::ErrorKind::InvalidInput) if the timeout is zero, and
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use std::io::{ErrorKind, Read};
            /// use std::time::Duration;
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (mut one, _other) = UnixStream::pair().unwrap();
            ///     one.set_read_timeout(Some(Duration::from_millis(2))).unwrap();
            ///     let error = one.read(&mut [0; 8]).unwrap_err();
            ///     assert_eq!(error.kind(), ErrorKind::TimedOut);
            /// });
            /// ```
            pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
                self.fd.set_timeout(Direction::Read, timeout)
            }

            /// Sets how long each write or send may wait.
            ///
            /// Everything that [`set_read_timeout`](Self::set_read_timeout) says about reads holds
            /// here for writes.
            ///
            /// # Errors
            /// [`InvalidInput`](io::ErrorKind::InvalidInput) if the timeout is zero, and
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use std::io::{ErrorKind, Write};
            /// use std::time::Duration;
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (mut one, _other) = UnixStream::pair().unwrap();
            ///     one.set_write_timeout(Some(Duration::from_millis(2))).unwrap();
            ///     // The other side does not read: the buffer fills up, and then a write waits.
            ///     let error = loop {
            ///         if let Err(error) = one.write(&[0; 4096]) {
            ///             break error;
            ///         }
            ///     };
            ///     assert_eq!(error.kind(), ErrorKind::TimedOut);
            /// });
            /// ```
            pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
                self.fd.set_timeout(Direction::Write, timeout)
            }

            /// Returns the timeout that [`set_read_timeout`](Self::set_read_timeout) has set.
            ///
            /// # Errors
            /// Never fails; the signature is std's.
            pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
                Ok(self.fd.timeout(Direction::Read))
            }

            /// Returns the timeout that [`set_write_timeout`](Self::set_write_timeout) has set.
            ///
            /// # Errors
            /// Never fails; the signature is std's.
            pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
                Ok(self.fd.timeout(Direction::Write))
            }
        }
    };
}
pub(super) use deadlines;

/// `Read` and `Write` for a stream and references to it.
macro_rules! streams {
    ($($name:ty),+) => {
        $(
            /// Reads park the goroutine until data arrives. They return 0 when the other side has
            /// ended its direction of the connection.
            ///
            /// # Errors
            /// [`TimedOut`](io::ErrorKind::TimedOut) after the read deadline or timeout,
            /// [`NotConnected`](io::ErrorKind::NotConnected) after `close`, the error of a done
            /// context (`cancel_on`), and [`ConnectionReset`](io::ErrorKind::ConnectionReset) if
            /// the other side has reset the connection.
            impl Read for $name {
                fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
                    self.fd.read(buf.len(), |fd| $crate::sys::syscalls::read(fd, &mut *buf))
                }

                fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
                    // What `readv` passes to the kernel, whose limit it is.
                    let passed = bufs.len().min(libc::UIO_MAXIOV as usize);
                    let len = bufs[..passed].iter().map(|buf| buf.len()).sum();
                    self.fd.read(len, |fd| $crate::sys::syscalls::readv(fd, bufs))
                }
            }

            /// Writes park the goroutine until the kernel's buffer has room, and may write less
            /// than the whole buffer. `flush` does nothing, because there is no buffer in this
            /// process.
            ///
            /// # Errors
            /// [`TimedOut`](io::ErrorKind::TimedOut) after the write deadline or timeout,
            /// [`NotConnected`](io::ErrorKind::NotConnected) after `close`, the error of a done
            /// context (`cancel_on`), and [`BrokenPipe`](io::ErrorKind::BrokenPipe) or
            /// [`ConnectionReset`](io::ErrorKind::ConnectionReset) if the other side does not read
            /// any more. No write raises SIGPIPE.
            impl Write for $name {
                fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
                    self.fd.io(Direction::Write, |fd| {
                        $crate::sys::syscalls::send(fd, buf)
                    })
                }

                fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
                    let bufs = $crate::net::fd::at_most_iov_max(bufs);
                    self.fd.io(Direction::Write, |fd| {
                        $crate::sys::syscalls::send_vectored(fd, bufs)
                    })
                }

                fn flush(&mut self) -> io::Result<()> {
                    Ok(())
                }
            }
        )+
    };
}
pub(super) use streams;

/// `split` and the two types that it returns.
macro_rules! halves {
    ($stream:ident, $read:ident, $write:ident) => {
        impl $stream {
            /// Splits the connection into a reading and a writing half, which can be moved to
            /// different goroutines.
            ///
            /// A half is needed only for ownership: any number of goroutines may also use one
            /// stream through a reference.
            ///
            /// # Drop
            /// Dropping the writing half ends its direction, so that the other side reads
            /// end-of-file. The descriptor is closed when both halves are dropped.
            ///
            /// # Examples
            /// ```
            /// use std::io::{Read, Write};
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (client, mut server) = UnixStream::pair().unwrap();
            ///     trefoil::go(move || {
            ///         let mut request = String::new();
            ///         server.read_to_string(&mut request).unwrap();
            ///         server.write_all(request.to_uppercase().as_bytes()).unwrap();
            ///     });
            ///     let (mut reader, mut writer) = client.split();
            ///     trefoil::go(move || writer.write_all(b"hello").unwrap());
            ///     let mut answer = String::new();
            ///     reader.read_to_string(&mut answer).unwrap();
            ///     assert_eq!(answer, "HELLO");
            /// });
            /// ```
            pub fn split(self) -> ($read, $write) {
                ($read { stream: $stream { fd: self.fd.clone() } }, $write { stream: self })
            }
        }

        #[doc = concat!("The reading half of a [`", stringify!($stream), "`], from its `split`.")]
        ///
        /// It implements [`Read`]. The methods of the whole connection, such as deadlines, are
        /// available through [`stream`](Self::stream).
        ///
        /// # Drop
        /// Dropping this half does not end a direction. The descriptor is closed when both halves
        /// are dropped.
        ///
        /// # Examples
        /// ```
        /// use std::io::{ErrorKind, Read};
        /// use std::time::{Duration, Instant};
        /// use trefoil::net::UnixStream;
        ///
        /// trefoil::run(|| {
        ///     let (one, _other) = UnixStream::pair().unwrap();
        ///     let (mut reader, _writer) = one.split();
        ///     let deadline = Instant::now() + Duration::from_millis(2);
        ///     reader.stream().set_read_deadline(Some(deadline)).unwrap();
        ///     let error = reader.read(&mut [0; 8]).unwrap_err();
        ///     assert_eq!(error.kind(), ErrorKind::TimedOut);
        /// });
        /// ```
        #[derive(Debug)]
        pub struct $read {
            stream: $stream,
        }

        impl $read {
            /// Returns the whole connection, both directions.
            pub fn stream(&self) -> &$stream {
                &self.stream
            }
        }

        impl Read for $read {
            fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
                self.stream.read(buf)
            }

            fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
                self.stream.read_vectored(bufs)
            }
        }

        #[doc = concat!("The writing half of a [`", stringify!($stream), "`], from its `split`.")]
        ///
        /// It implements [`Write`]. The methods of the whole connection, such as deadlines, are
        /// available through [`stream`](Self::stream).
        ///
        /// # Drop
        /// Dropping this half ends its direction (`shutdown(Shutdown::Write)`), so that the other
        /// side reads end-of-file. The descriptor is closed when both halves are dropped.
        ///
        /// # Examples
        /// ```
        /// use std::io::{Read, Write};
        /// use trefoil::net::UnixStream;
        ///
        /// trefoil::run(|| {
        ///     let (one, mut other) = UnixStream::pair().unwrap();
        ///     let (_reader, mut writer) = one.split();
        ///     writer.write_all(b"the end").unwrap();
        ///     drop(writer);
        ///     let mut text = String::new();
        ///     other.read_to_string(&mut text).unwrap();
        ///     assert_eq!(text, "the end");
        /// });
        /// ```
        #[derive(Debug)]
        pub struct $write {
            stream: $stream,
        }

        impl $write {
            /// Returns the whole connection, both directions.
            pub fn stream(&self) -> &$stream {
                &self.stream
            }
        }

        impl Write for $write {
            fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
                self.stream.write(buf)
            }

            fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
                self.stream.write_vectored(bufs)
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }

        impl Drop for $write {
            fn drop(&mut self) {
                let _ = self.stream.shutdown(Shutdown::Write);
            }
        }
    };
}
pub(super) use halves;

/// `readable` and `writable`, for sockets in async code.
macro_rules! readiness {
    ($name:ident) => {
        impl $name {
            /// Waits until a read would not block: there is data, a connection to accept,
            /// end-of-file or an error. For async code.
            ///
            /// Several tasks may wait, and all of them are woken: the read of a task may find that
            /// another one was faster.
            ///
            /// # Errors
            /// [`TimedOut`](io::ErrorKind::TimedOut) after the read deadline or timeout,
            /// [`NotConnected`](io::ErrorKind::NotConnected) after `close`, and the error of a done
            /// context (`cancel_on`).
            ///
            /// # Cancel
            /// Dropping the future loses nothing.
            pub async fn readable(&self) -> io::Result<()> {
                let ready =
                    |fd: BorrowedFd<'_>| crate::net::async_io::attempt_ready(fd, Direction::Read);
                self.fd.io_async(Direction::Read, ready).await
            }

            /// Waits until a write would not block, or would fail. For async code.
            ///
            /// # Errors
            /// [`TimedOut`](io::ErrorKind::TimedOut) after the write deadline or timeout,
            /// [`NotConnected`](io::ErrorKind::NotConnected) after `close`, and the error of a done
            /// context (`cancel_on`).
            ///
            /// # Cancel
            /// Dropping the future loses nothing.
            pub async fn writable(&self) -> io::Result<()> {
                let ready =
                    |fd: BorrowedFd<'_>| crate::net::async_io::attempt_ready(fd, Direction::Write);
                self.fd.io_async(Direction::Write, ready).await
            }
        }
    };
}
pub(super) use readiness;

/// Reads and writes of a stream in async code.
macro_rules! async_streams {
    ($name:ident) => {
        impl $name {
            /// Reads data. A result of 0 means end-of-file. It is `read` for async code.
            ///
            /// Any number of tasks, goroutines and threads may read a stream at the same time.
            ///
            /// # Errors
            /// Those of `read`: [`TimedOut`](io::ErrorKind::TimedOut) after the read deadline or
            /// timeout, [`NotConnected`](io::ErrorKind::NotConnected) after `close`, the error of a
            /// done context (`cancel_on`), and [`ConnectionReset`](io::ErrorKind::ConnectionReset)
            /// if the other side has reset the connection.
            ///
            /// # Cancel
            /// If the future is dropped before it is ready, no data was read.
            ///
            /// # Examples
            /// ```
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (one, other) = UnixStream::pair().unwrap();
            ///     let reader = trefoil::task::spawn(async move {
            ///         let mut buf = [0; 8];
            ///         let n = other.read_async(&mut buf).await.unwrap();
            ///         buf[..n].to_vec()
            ///     });
            ///     trefoil::block_on(one.write_async(b"hello")).unwrap();
            ///     assert_eq!(reader.join().unwrap(), b"hello");
            /// });
            /// ```
            pub async fn read_async(&self, buf: &mut [u8]) -> io::Result<usize> {
                let len = buf.len();
                self.fd
                    .io_async(Direction::Read, |fd: BorrowedFd<'_>| {
                        self.fd
                            .read_unless_drained(len, || $crate::sys::syscalls::read(fd, &mut *buf))
                    })
                    .await
            }

            /// As [`read_async`](Self::read_async), and leaves the data in the kernel's buffer for
            /// the next read.
            ///
            /// # Errors
            /// As [`read_async`](Self::read_async).
            ///
            /// # Cancel
            /// Dropping the future loses nothing.
            pub async fn peek_async(&self, buf: &mut [u8]) -> io::Result<usize> {
                self.fd
                    .io_async(Direction::Read, |fd: BorrowedFd<'_>| {
                        $crate::sys::syscalls::recv(fd, &mut *buf, libc::MSG_PEEK)
                    })
                    .await
            }

            /// Writes data, and returns how many bytes the kernel has taken. It is `write` for
            /// async code.
            ///
            /// # Errors
            /// Those of `write`: [`TimedOut`](io::ErrorKind::TimedOut) after the write deadline or
            /// timeout, [`NotConnected`](io::ErrorKind::NotConnected) after `close`, the error of a
            /// done context (`cancel_on`), [`BrokenPipe`](io::ErrorKind::BrokenPipe) if the
            /// direction has ended, and [`ConnectionReset`](io::ErrorKind::ConnectionReset).
            ///
            /// # Cancel
            /// If the future is dropped before it is ready, no data was written.
            pub async fn write_async(&self, buf: &[u8]) -> io::Result<usize> {
                self.fd
                    .io_async(Direction::Write, |fd: BorrowedFd<'_>| {
                        $crate::sys::syscalls::send(fd, buf)
                    })
                    .await
            }

            /// As [`write_async`](Self::write_async), from several buffers.
            ///
            /// # Errors
            /// As [`write_async`](Self::write_async).
            ///
            /// # Cancel
            /// If the future is dropped before it is ready, no data was written.
            pub async fn write_vectored_async(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
                let bufs = $crate::net::fd::at_most_iov_max(bufs);
                self.fd
                    .io_async(Direction::Write, |fd: BorrowedFd<'_>| {
                        $crate::sys::syscalls::send_vectored(fd, bufs)
                    })
                    .await
            }
        }
    };
}
pub(super) use async_streams;
