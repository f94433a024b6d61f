//! Why a goroutine waits, in Go's words.

/// A wait reason, as dumps and traces print it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum WaitReason {
    /// `JoinHandle::join` (Go has no join; a WaitGroup is the nearest).
    Join = 0,
    /// The end of a `scope`.
    Scope,
}

impl WaitReason {
    const ALL: [WaitReason; 2] = [WaitReason::Join, WaitReason::Scope];

    pub(crate) fn from_u8(n: u8) -> WaitReason {
        Self::ALL[usize::from(n) % Self::ALL.len()]
    }

    pub(crate) fn text(self) -> &'static str {
        match self {
            WaitReason::Join => "join",
            WaitReason::Scope => "scope",
        }
    }
}
