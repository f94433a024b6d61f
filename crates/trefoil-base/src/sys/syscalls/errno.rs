//! `Errno`: the number by which the kernel names an error.

use std::fmt;
use std::io;

/// The error of a system call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(i32);

/// The result of a system call.
pub type Result<T> = core::result::Result<T, Errno>;

impl Errno {
    /// The call would have to wait; or the word of a futex has another value.
    pub const AGAIN: Errno = Errno(libc::EAGAIN);
    /// The other side has given up a connection before it was accepted.
    pub const CONNABORTED: Errno = Errno(libc::ECONNABORTED);
    /// Nothing listens at the address.
    pub const CONNREFUSED: Errno = Errno(libc::ECONNREFUSED);
    /// The process has no memory at an address.
    pub const FAULT: Errno = Errno(libc::EFAULT);
    /// A signal has ended the call.
    pub const INTR: Errno = Errno(libc::EINTR);
    /// An argument is not valid.
    pub const INVAL: Errno = Errno(libc::EINVAL);
    /// No memory or no mapping is left.
    #[cfg(test)]
    pub const NOMEM: Errno = Errno(libc::ENOMEM);
    /// The process or thread does not exist.
    pub const SRCH: Errno = Errno(libc::ESRCH);
    /// The limit of a wait has passed.
    #[cfg(feature = "std")]
    pub const TIMEDOUT: Errno = Errno(libc::ETIMEDOUT);

    /// Returns the error of a call that was made by std. None if it is an error of std itself.
    pub fn of_io_error(error: &io::Error) -> Option<Errno> {
        error.raw_os_error().map(Errno)
    }
}

/// Converts the kernel's result: a negative one is minus the error number. No call that succeeds
/// returns a negative number: addresses of user space are in the lower half of all addresses.
#[inline(always)]
pub fn checked(result: isize) -> Result<usize> {
    if result < 0 { Err(Errno(-result as i32)) } else { Ok(result as usize) }
}

impl From<Errno> for io::Error {
    fn from(error: Errno) -> io::Error {
        io::Error::from_raw_os_error(error.0)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        io::Error::from(*self).fmt(f)
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&io::Error::from(*self), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_negative_result_is_the_error_of_that_number() {
        assert_eq!(checked(-11), Err(Errno::AGAIN));
        assert_eq!(checked(-4095), Err(Errno(4095)));
        assert_eq!(checked(0), Ok(0));
        assert_eq!(checked(isize::MAX), Ok(isize::MAX as usize));
        let error = io::Error::from(Errno::CONNREFUSED);
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(Errno::of_io_error(&error), Some(Errno::CONNREFUSED));
        assert_eq!(Errno::of_io_error(&io::Error::other("no number")), None);
    }
}
