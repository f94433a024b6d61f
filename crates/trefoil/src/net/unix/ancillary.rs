//! Descriptors and credentials that travel beside the bytes of a Unix socket (`cmsg(3)`).

use super::unnamed_addr;
use crate::sys::syscalls::{self, Errno};
use std::ffi::OsStr;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::{offset_of, zeroed};
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::SocketAddr;

/// The most descriptors that the kernel sends at once (`SCM_MAX_FD`).
const MAX_FDS: usize = 253;
const FD_BYTES: usize = size_of::<RawFd>();
const CREDENTIALS_BYTES: usize = size_of::<libc::ucred>();

/// Returns the room that a control message of `len` bytes takes.
const fn space(len: usize) -> usize {
    // SAFETY: it only computes.
    unsafe { libc::CMSG_SPACE(len as u32) as usize }
}

/// Room for [`MAX_FDS`] descriptors and for credentials, aligned as control messages are.
struct Control([u64; Control::BYTES / 8]);

impl Control {
    const BYTES: usize = space(MAX_FDS * FD_BYTES) + space(CREDENTIALS_BYTES);

    fn new() -> Control {
        const { assert!(align_of::<libc::cmsghdr>() <= align_of::<u64>()) };
        Control([0; Control::BYTES / 8])
    }
}

/// A user, a group and a process: the sender of a message, or the process at the other end.
///
/// # Examples
/// ```
/// use std::io::IoSliceMut;
/// use trefoil::net::UnixDatagram;
///
/// trefoil::run(|| {
///     let (one, other) = UnixDatagram::pair().unwrap();
///     other.set_passcred(true).unwrap();
///     one.send(b"hello").unwrap();
///     let mut bytes = [0; 16];
///     let received = other.recv_with_fds(&mut [IoSliceMut::new(&mut bytes)], 0).unwrap();
///     let sender = received.credentials.unwrap();
///     assert_eq!(sender.pid, Some(std::process::id() as i32));
/// });
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct UCred {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The process. `None` if it is outside of this process's PID namespace.
    pub pid: Option<i32>,
}

impl UCred {
    fn new(raw: libc::ucred) -> UCred {
        UCred { uid: raw.uid, gid: raw.gid, pid: (raw.pid != 0).then_some(raw.pid) }
    }

    /// Returns the credentials of the other side of a connected socket.
    pub(super) fn of_peer(fd: BorrowedFd<'_>) -> io::Result<UCred> {
        Ok(UCred::new(syscalls::peer_credentials(fd)?))
    }
}

/// What came with the bytes of a message: returned by `recv_with_fds` of the Unix sockets.
///
/// # Drop
/// Dropping it closes the descriptors that were not taken out of `fds`.
///
/// # Examples
/// ```
/// use std::io::{IoSlice, IoSliceMut, Read, Write};
/// use std::os::fd::AsFd;
/// use trefoil::net::{UnixStream, pipe, PipeReader};
///
/// trefoil::run(|| {
///     let (one, other) = UnixStream::pair().unwrap();
///     let (reader, mut writer) = pipe().unwrap();
///     one.send_with_fds(&[IoSlice::new(b"a pipe")], &[reader.as_fd()]).unwrap();
///     drop(reader);
///
///     let mut bytes = [0; 16];
///     let received = other.recv_with_fds(&mut [IoSliceMut::new(&mut bytes)], 1).unwrap();
///     assert_eq!(&bytes[..received.len], b"a pipe");
///     let [fd] = received.fds.try_into().unwrap();
///     let mut reader = PipeReader::try_from(fd).unwrap();
///     writer.write_all(b"through it").unwrap();
///     drop(writer);
///     let mut text = String::new();
///     reader.read_to_string(&mut text).unwrap();
///     assert_eq!(text, "through it");
/// });
/// ```
#[derive(Default)]
#[non_exhaustive]
pub struct Received {
    /// How many bytes were received.
    pub len: usize,
    /// The descriptors, all with `FD_CLOEXEC`.
    pub fds: Vec<OwnedFd>,
    /// The sender, if `set_passcred` was set.
    pub credentials: Option<UCred>,
    /// The part of a datagram that did not fit into the buffers was lost.
    pub is_truncated: bool,
    /// More descriptors came than `max_fds`. The kernel has closed them.
    pub lost_fds: bool,
    sender: Option<(libc::sockaddr_un, usize)>,
}

impl Received {
    /// Returns the address of the socket that sent a datagram. It is unnamed if that socket is not
    /// bound, and for a stream.
    ///
    /// # Errors
    /// Returns the error of std's constructors of addresses, which does not happen with the
    /// addresses of the kernel.
    ///
    /// # Examples
    /// ```
    /// use std::io::IoSliceMut;
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let (one, other) = UnixDatagram::pair().unwrap();
    ///     one.send(b"hello").unwrap();
    ///     let received = other.recv_with_fds(&mut [IoSliceMut::new(&mut [0; 8])], 0).unwrap();
    ///     assert!(received.sender().unwrap().is_unnamed());
    /// });
    /// ```
    pub fn sender(&self) -> io::Result<SocketAddr> {
        let Some((raw, len)) = &self.sender else { return unnamed_addr() };
        let len = len.saturating_sub(offset_of!(libc::sockaddr_un, sun_path));
        #[allow(clippy::unnecessary_cast, reason = "c_char is u8 on aarch64")]
        let path = &raw.sun_path.map(|c| c as u8)[..len.min(raw.sun_path.len())];
        match path {
            [] => unnamed_addr(),
            [0, name @ ..] => SocketAddr::from_abstract_name(name),
            _ => {
                let end = path.iter().position(|&b| b == 0).unwrap_or(path.len());
                SocketAddr::from_pathname(OsStr::from_bytes(&path[..end]))
            }
        }
    }

    /// As [`Received::sender`], for an attempt.
    pub(super) fn address(&self) -> Result<SocketAddr, Errno> {
        self.sender().map_err(|_| Errno::INVAL)
    }
}

impl std::fmt::Debug for Received {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Received")
            .field("len", &self.len)
            .field("fds", &self.fds)
            .field("credentials", &self.credentials)
            .finish_non_exhaustive()
    }
}

/// Makes an attempt to send bytes and descriptors.
pub(super) fn send_message(
    fd: BorrowedFd<'_>,
    bufs: &[IoSlice<'_>],
    fds: &[BorrowedFd<'_>],
) -> Result<usize, Errno> {
    if fds.len() > MAX_FDS {
        return Err(Errno::INVAL);
    }
    let bufs = crate::net::fd::at_most_iov_max(bufs);
    let mut control = Control::new();
    // SAFETY: all zeros is a value of the structure.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = bufs.as_ptr().cast_mut().cast();
    message.msg_iovlen = bufs.len();
    if !fds.is_empty() {
        let bytes = size_of_val(fds);
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = space(bytes);
        // SAFETY: the control buffer has room for the header and the descriptors, and is aligned.
        // `BorrowedFd` is a descriptor's number.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(bytes as u32) as usize;
            libc::CMSG_DATA(header).copy_from_nonoverlapping(fds.as_ptr().cast(), bytes);
        }
    }
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: `IoSlice` is an `iovec`; the buffers, the control buffer and the message live until
    // the call returns. The kernel does not write to them.
    unsafe { syscalls::sendmsg(fd, &message, flags) }
}

/// Makes an attempt to receive bytes, at most `max_fds` descriptors, and credentials.
pub(super) fn recv_message(
    fd: BorrowedFd<'_>,
    bufs: &mut [IoSliceMut<'_>],
    max_fds: usize,
    flags: i32,
) -> Result<Received, Errno> {
    let max_fds = max_fds.min(MAX_FDS);
    let mut control = Control::new();
    // SAFETY: all zeros is a value of both structures.
    let (mut message, mut sender): (libc::msghdr, libc::sockaddr_un) = unsafe { zeroed() };
    message.msg_name = (&raw mut sender).cast();
    message.msg_namelen = size_of_val(&sender) as libc::socklen_t;
    message.msg_iov = bufs.as_mut_ptr().cast();
    message.msg_iovlen = bufs.len().min(libc::UIO_MAXIOV as usize);
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = space(CREDENTIALS_BYTES) + space(max_fds * FD_BYTES);
    let flags = flags | libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
    // SAFETY: `IoSliceMut` is an `iovec`; all buffers have the sizes that the kernel is told, and
    // live until the call returns.
    let len = unsafe { syscalls::recvmsg(fd, &mut message, flags) }?;
    let mut received = Received {
        len,
        is_truncated: message.msg_flags & libc::MSG_TRUNC != 0,
        lost_fds: message.msg_flags & libc::MSG_CTRUNC != 0,
        sender: Some((sender, message.msg_namelen as usize)),
        ..Received::default()
    };
    // SAFETY: the kernel has filled the control buffer with messages, and has set its length. The
    // descriptors in it were made for this process, and have no other owner.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while let Some(cmsg) = header.as_ref() {
            let data = libc::CMSG_DATA(header);
            // No kernel writes a message that is shorter than its header. Emulators of the system
            // calls do, for a message that they could not convert.
            let Some(bytes) = cmsg.cmsg_len.checked_sub(libc::CMSG_LEN(0) as usize) else { break };
            match (cmsg.cmsg_level, cmsg.cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                    for i in 0..bytes / FD_BYTES {
                        let raw = data.cast::<RawFd>().add(i).read_unaligned();
                        received.fds.push(OwnedFd::from_raw_fd(raw));
                    }
                }
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                    let raw = data.cast::<libc::ucred>().read_unaligned();
                    received.credentials = Some(UCred::new(raw));
                }
                _ => {}
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    // Without credentials, their room may have held descriptors.
    if received.fds.len() > max_fds {
        received.fds.truncate(max_fds);
        received.lost_fds = true;
    }
    Ok(received)
}

/// Descriptors and credentials over a Unix socket. The type has methods `send_message` and
/// `recv_message`, which make one attempt.
macro_rules! ancillary {
    ($name:ident) => {
        impl $name {
            /// Sends bytes and descriptors (`SCM_RIGHTS`), and returns how many bytes were sent.
            ///
            /// The receiver gets duplicates of the descriptors with
            /// [`recv_with_fds`](Self::recv_with_fds). The goroutine waits as for other sends. A
            /// stream may send a part of the bytes; the descriptors are sent with the first one, so
            /// the caller sends the rest without them.
            ///
            /// # Errors
            /// [`InvalidInput`](io::ErrorKind::InvalidInput) for more than 253 descriptors, and for
            /// descriptors without a byte on a stream, which the kernel would lose. The OS error
            /// `ETOOMANYREFS` if too many sent descriptors were not received yet. Otherwise those
            /// of other sends.
            ///
            /// # Examples
            /// ```
            /// use std::io::{IoSlice, IoSliceMut};
            /// use std::os::fd::AsFd;
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (one, other) = UnixStream::pair().unwrap();
            ///     let file = std::fs::File::open("/dev/null").unwrap();
            ///     one.send_with_fds(&[IoSlice::new(b"x")], &[file.as_fd()]).unwrap();
            ///     let mut byte = [0];
            ///     let bufs = &mut [IoSliceMut::new(&mut byte)];
            ///     let received = other.recv_with_fds(bufs, 4).unwrap();
            ///     assert_eq!((received.len, received.fds.len()), (1, 1));
            /// });
            /// ```
            pub fn send_with_fds(
                &self,
                bufs: &[IoSlice<'_>],
                fds: &[BorrowedFd<'_>],
            ) -> io::Result<usize> {
                self.fd.io(Direction::Write, |fd| self.send_message(fd, bufs, fds))
            }

            /// As [`send_with_fds`](Self::send_with_fds), in async code.
            ///
            /// # Errors
            /// As [`send_with_fds`](Self::send_with_fds).
            ///
            /// # Cancel
            /// If the future is dropped before it is ready, nothing was sent.
            pub async fn send_with_fds_async(
                &self,
                bufs: &[IoSlice<'_>],
                fds: &[BorrowedFd<'_>],
            ) -> io::Result<usize> {
                let send = |fd: BorrowedFd<'_>| self.send_message(fd, bufs, fds);
                self.fd.io_async(Direction::Write, send).await
            }

            /// Receives bytes, at most `max_fds` descriptors, and the sender's credentials.
            ///
            /// The goroutine waits as for other receives. Credentials come with every message after
            /// [`set_passcred`](Self::set_passcred). Descriptors that arrive at another kind of
            /// receive are lost: the kernel closes them.
            ///
            /// # Errors
            /// As for other receives.
            ///
            /// # Examples
            /// See [`send_with_fds`](Self::send_with_fds).
            pub fn recv_with_fds(
                &self,
                bufs: &mut [IoSliceMut<'_>],
                max_fds: usize,
            ) -> io::Result<Received> {
                self.fd.io(Direction::Read, |fd| self.recv_message(fd, bufs, max_fds))
            }

            /// As [`recv_with_fds`](Self::recv_with_fds), in async code.
            ///
            /// # Errors
            /// As [`recv_with_fds`](Self::recv_with_fds).
            ///
            /// # Cancel
            /// If the future is dropped before it is ready, nothing was received.
            pub async fn recv_with_fds_async(
                &self,
                bufs: &mut [IoSliceMut<'_>],
                max_fds: usize,
            ) -> io::Result<Received> {
                let receive = |fd: BorrowedFd<'_>| self.recv_message(fd, bufs, max_fds);
                self.fd.io_async(Direction::Read, receive).await
            }

            /// Returns whether received messages carry the sender's credentials (`SO_PASSCRED`).
            ///
            /// # Errors
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            pub fn passcred(&self) -> io::Result<bool> {
                self.fd.with(|s| s.passcred())
            }

            /// Sets whether received messages carry the sender's credentials (`SO_PASSCRED`), for
            /// [`recv_with_fds`](Self::recv_with_fds). The default is `false`.
            ///
            /// # Errors
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (one, _other) = UnixStream::pair().unwrap();
            ///     assert!(!one.passcred().unwrap());
            ///     one.set_passcred(true).unwrap();
            ///     assert!(one.passcred().unwrap());
            /// });
            /// ```
            pub fn set_passcred(&self, passcred: bool) -> io::Result<()> {
                self.fd.with(|s| s.set_passcred(passcred))
            }
        }
    };
}
pub(super) use ancillary;
