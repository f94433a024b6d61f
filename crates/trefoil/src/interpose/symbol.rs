//! How an interposed function is defined: the exported symbol, and libc's function of that name.
//!
//! `interpose!` has three forms:
//!
//! | form | on a goroutine | on a plain thread |
//! |---|---|---|
//! | `on_goroutine => body` | `body`, which returns a system call's result | the real function |
//! | `with real => body` | `body`, which may call `real` | the same `body` |
//! | `always => body` | `body` | the same `body` |
//!
//! A system call's result is a negative error number, or not negative; the macro sets errno.
//!
//! The first two find the real function by [`NextSymbol`], at the first call of `real`. The third
//! is for functions that need another way (`c_locks/real.rs`), that share the real function with
//! other code, or that have none.
//!
//! Not defined by the macro: `dlopen`, `dlmopen` and `syscall` jump to the real function with their
//! caller's frame, so they are assembler; `malloc`, the clocks and `pthread_create` are weak
//! symbols, which only assembler can define (`weak_symbols!`).

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// The next definition of a symbol after ours (`RTLD_NEXT`), which is libc's. Looked up once.
pub(crate) struct NextSymbol {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl NextSymbol {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// As [`NextSymbol::new`], for a name that ends with a zero byte.
    pub(crate) const fn of_c_name(name: &'static str) -> Self {
        match CStr::from_bytes_with_nul(name.as_bytes()) {
            Ok(name) => Self::new(name),
            Err(_) => panic!("a symbol's name must end with its only zero byte"),
        }
    }

    /// Returns the function's address. If two threads look it up at once, both find the same one.
    #[inline]
    pub(crate) fn address(&self) -> *mut c_void {
        // Relaxed: only code is read through the address.
        let address = self.address.load(Ordering::Relaxed);
        if address.is_null() { self.address_slow() } else { address }
    }

    /// Returns the function.
    ///
    /// # Safety
    /// `F` is the function's type.
    #[inline(always)]
    pub(crate) unsafe fn function<F: Copy>(&self) -> F {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: a function pointer is an address.
        unsafe { std::mem::transmute_copy(&self.address()) }
    }

    #[cold]
    fn address_slow(&self) -> *mut c_void {
        // SAFETY: a C string and a pseudo handle.
        let address = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        if address.is_null() {
            crate::sys::fatal(format_args!("trefoil: libc has no {}", self.name.to_string_lossy()));
        }
        self.address.store(address, Ordering::Relaxed);
        address
    }
}

/// Defines an interposed function. See the head of the file.
macro_rules! interpose {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) -> $ret:ty;
     on_goroutine => $body:expr) => {
        interpose! {
            $(#[$doc])*
            fn $name($($arg: $type),*) -> $ret;
            with real => {
                if !$crate::interpose::park::on_goroutine() {
                    return real($($arg),*);
                }
                $crate::sys::raw::to_libc($body) as $ret
            }
        }
    };

    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) -> $ret:ty;
     with $real:ident => $body:expr) => {
        interpose! {
            $(#[$doc])*
            fn $name($($arg: $type),*) -> $ret;
            always => {
                static NEXT: $crate::interpose::symbol::NextSymbol =
                    $crate::interpose::symbol::NextSymbol::of_c_name(
                        concat!(stringify!($name), "\0"));

                #[inline(always)]
                unsafe fn $real($($arg: $type),*) -> $ret {
                    type Real = unsafe extern "C" fn($($type),*) -> $ret;
                    // SAFETY: libc's function of that name and type, with the caller's arguments.
                    unsafe { NEXT.function::<Real>()($($arg),*) }
                }

                $body
            }
        }
    };

    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) -> $ret:ty;
     always => $body:expr) => {
        interpose! {
            $(#[$doc])*
            extern "C" fn $name($($arg: $type),*) -> $ret;
            always => $body
        }
    };

    ($(#[$doc:meta])* extern $abi:tt fn $name:ident($($arg:ident: $type:ty),*) -> $ret:ty;
     always => $body:expr) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As its manual page says.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern $abi fn $name($($arg: $type),*) -> $ret {
            // SAFETY: the caller's arguments, by the rules of the call.
            unsafe { $body }
        }
    };
}

/// Defines weak symbols with libc's names, which jump to the functions of the same names where it
/// is used: a program may define such a function itself. Rust has no stable attribute for weak
/// symbols, hence assembler instead of `interpose!`.
#[cfg(feature = "std")]
macro_rules! weak_symbols {
    ($($name:ident)+) => {
        std::arch::global_asm!(
            ".pushsection .text.trefoil_weak,\"ax\",@progbits",
            $(
                concat!(".weak ", stringify!($name)),
                concat!(".type ", stringify!($name), ",@function"),
                ".p2align 4",
                concat!(
                    stringify!($name), ": ", $crate::arch::jump_instruction!(),
                    " {", stringify!($name), "}"
                ),
                concat!(".size ", stringify!($name), ", .-", stringify!($name)),
            )+
            ".popsection",
            $($name = sym $name,)+
        );
    };
}
