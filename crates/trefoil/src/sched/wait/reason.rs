//! Why a goroutine waits, in Go's words: dumps and traces print it.

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)+) => {
        /// Why a goroutine waits.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u8)]
        pub(crate) enum WaitReason {
            $($(#[$doc])* $name,)+
        }

        impl WaitReason {
            const ALL: &[WaitReason] = &[$(WaitReason::$name,)+];
            /// The texts by number, for debuggers (`observe/layout.rs`).
            pub(crate) const TEXTS: &[&str] = &[$($text,)+];

            /// Returns the text that dumps and traces print.
            pub(crate) fn text(self) -> &'static str {
                match self {
                    $(WaitReason::$name => $text,)+
                }
            }
        }
    };
}

reasons! {
    /// `JoinHandle::join`. Go has no join.
    Join = "join",
    /// The end of a `scope`. Go has no scope.
    Scope = "scope",
    Sleep = "sleep",
    ChanReceive = "chan receive",
    ChanSend = "chan send",
    /// `chan::never()` and `chan::nil()`, Go's nil channel.
    ChanReceiveNil = "chan receive (nil chan)",
    ChanSendNil = "chan send (nil chan)",
    Select = "select",
    SelectNoCases = "select (no cases)",
    MutexLock = "sync.Mutex.Lock",
    RwLockRead = "sync.RWMutex.RLock",
    RwLockWrite = "sync.RWMutex.Lock",
    CondWait = "sync.Cond.Wait",
    WaitGroupWait = "sync.WaitGroup.Wait",
    /// `Once`, `OnceLock`: another goroutine runs the initialiser.
    Once = "sync.Once.Do",
    Barrier = "sync.Barrier.Wait",
    Semacquire = "semacquire",
    /// `sim::settle`. Go's `synctest.Wait`.
    Settle = "synctest.Wait",
    /// The driver of a simulation waits for the end of a run.
    Simulation = "simulation",
    /// `Notify`. Go has no such thing.
    Notify = "notify",
    IoWait = "IO wait",
    /// A lock of std or of another crate. Go has no such thing.
    Futex = "futex wait",
    /// Locks of C and C++ code.
    PthreadMutex = "pthread mutex",
    PthreadRwLockRead = "pthread rwlock (read)",
    PthreadRwLockWrite = "pthread rwlock (write)",
    PthreadCond = "pthread cond",
    PthreadBarrier = "pthread barrier",
    PosixSemaphore = "POSIX semaphore",
    /// `block_on` of a future that is pending. Go has no futures.
    Future = "future",
}

impl WaitReason {
    /// Returns the reason that was stored as `n`. The remainder keeps a wrong number from
    /// panicking in a dump.
    pub(crate) fn from_u8(n: u8) -> WaitReason {
        Self::ALL[usize::from(n) % Self::ALL.len()]
    }
}
