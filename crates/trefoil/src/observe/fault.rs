//! Stack overflow: which goroutine it was.
//!
//! A goroutine that runs into its guard gets SIGSEGV. The handler runs on the thread's alternate stack,
//! sees that the address lies in a guard of the arena, says whose stack it was, prints its trace and
//! aborts. Any other fault goes to the handler that was there before us (std's, or the user's), which finds
//! what it has asked for: its mask, the signal blocked or not (`SA_NODEFER`), one call (`SA_RESETHAND`). It
//! may return, or leave by `siglongjmp`. Only `SA_ONSTACK` is not its choice (`interpose/signals.rs`). A
//! handler that is installed after ours may call ours for what is not its own.
//!
//! Nothing before the first message allocates. The trace does; the goroutine may have been inside
//! malloc when it overflowed, so the message comes first and the trace is given [`TRACE_LIMIT_SECS`]:
//! then SIGALRM ends the process.

use crate::mem;
use crate::sched::current_g;
use crate::sys::signal::{bit, current_mask, set_mask};
use crate::sys::stderr::{write_all_stderr, write_stderr};
use std::ffi::{c_int, c_void};
use std::fmt::Write;
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

/// Frames of an overflow that are printed: the innermost show the recursion.
const TRACE_FRAMES: usize = 48;
/// How long the trace may take before the process ends without it.
const TRACE_LIMIT_SECS: u32 = 10;

static INSTALL: Once = Once::new();
/// The actions before ours: SIGSEGV, SIGBUS.
static BEFORE: [Before; 2] = [const { Before::new() }; 2];

/// An action that another has installed. Written before the handler that reads it is installed, and when
/// its only call is used up.
struct Before {
    handler: AtomicUsize,
    flags: AtomicI32,
    /// Bit n − 1 is signal n.
    mask: AtomicU64,
}

impl Before {
    const fn new() -> Before {
        Before {
            handler: AtomicUsize::new(libc::SIG_DFL),
            flags: AtomicI32::new(0),
            mask: AtomicU64::new(0),
        }
    }

    fn set(&self, action: &libc::sigaction) {
        self.handler.store(action.sa_sigaction, Ordering::Relaxed);
        self.flags.store(action.sa_flags, Ordering::Relaxed);
        // SAFETY: the kernel's set is the first word.
        let mask = unsafe { (&raw const action.sa_mask).cast::<u64>().read() };
        self.mask.store(mask, Ordering::Relaxed);
    }

    /// The handler to call now, or SIG_DFL or SIG_IGN.
    fn take(&self) -> usize {
        if self.flags.load(Ordering::Relaxed) & libc::SA_RESETHAND != 0 {
            self.handler.swap(libc::SIG_DFL, Ordering::Relaxed)
        } else {
            self.handler.load(Ordering::Relaxed)
        }
    }
}

/// Puts our handler in, once.
pub(crate) fn install_handler() {
    INSTALL.call_once(|| {
        for (before, signal) in BEFORE.iter().zip([libc::SIGSEGV, libc::SIGBUS]) {
            // SAFETY: actions of our own; a handler of the right type for SA_SIGINFO.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, std::ptr::null(), &raw mut action);
                before.set(&action);
                action.sa_sigaction = on_fault as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                libc::sigemptyset(&raw mut action.sa_mask);
                libc::sigaction(signal, &raw const action, null_mut());
            }
        }
    });
}

unsafe extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a valid siginfo. One that a process has sent (code 0 or below) has no address.
    let address = unsafe { ((*info).si_code > 0).then(|| (*info).si_addr() as usize) };
    match address.and_then(mem::guard_hit) {
        Some(slot) => overflow_slow(slot.size),
        // SAFETY: passed on as it came.
        None => unsafe { pass_on(signal, info, context, address.is_some()) },
    }
}

/// To whoever handled this signal before us. `is_fault`: the kernel sent it, and the faulting instruction
/// is repeated when the handler returns.
unsafe fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void, is_fault: bool) {
    let before = &BEFORE[usize::from(signal != libc::SIGSEGV)];
    let handler = before.take();
    match handler {
        // A fault cannot be ignored. It is repeated under the default action, which reports its address.
        libc::SIG_DFL | libc::SIG_IGN if is_fault => return super::quit::set_default(signal),
        libc::SIG_DFL => return super::quit::raise_default(signal),
        libc::SIG_IGN => return,
        _ => {}
    }
    let flags = before.flags.load(Ordering::Relaxed);
    let ours = current_mask();
    let deferred = flags & libc::SA_NODEFER == 0;
    let kept = if deferred { ours | bit(signal) } else { ours & !bit(signal) };
    // Its own mask may contain the signal even so.
    set_mask(kept | before.mask.load(Ordering::Relaxed));
    type InfoHandler = unsafe extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
    type Handler = unsafe extern "C" fn(c_int);
    // SAFETY: its owner said by SA_SIGINFO which of the two it is.
    unsafe {
        if flags & libc::SA_SIGINFO != 0 {
            std::mem::transmute::<usize, InfoHandler>(handler)(signal, info, context);
        } else {
            std::mem::transmute::<usize, Handler>(handler)(signal);
        }
    }
    // If the handler before the last one called us, it goes on as it was.
    set_mask(ours);
}

#[cold]
fn overflow_slow(size: usize) -> ! {
    match current_g() {
        Some(g) => {
            let name = g.name().unwrap_or("");
            let (open, close) = if name.is_empty() { ("", "") } else { (" \"", "\"") };
            write_stderr(format_args!(
                "\ngoroutine {}{open}{name}{close} overflowed its stack ({} KiB)\n\
                 a larger one: trefoil::Builder::new().stack_size(bytes)\n",
                g.id(),
                size >> 10,
            ));
        }
        None => write_stderr(format_args!("\na goroutine overflowed its stack while it ended\n")),
    }
    // SAFETY: arms a timer whose default action ends us if the trace hangs in malloc.
    unsafe {
        libc::signal(libc::SIGALRM, libc::SIG_DFL);
        libc::alarm(TRACE_LIMIT_SECS);
    }
    print_trace();
    std::process::abort();
}

fn print_trace() {
    let mut shown = 0;
    let mut started = false;
    // SAFETY: the process ends here, so the lock that the synchronised form takes does not matter.
    unsafe {
        backtrace::trace_unsynchronized(|frame| {
            let mut text = String::new();
            backtrace::resolve_frame_unsynchronized(frame, |symbol| {
                let name = symbol.name().map_or("?".into(), |n| n.to_string());
                let _ = write!(text, "  {shown:>3}: {name}");
                if let (Some(file), Some(line)) = (symbol.filename(), symbol.lineno()) {
                    let _ = write!(text, "\n         at {}:{line}", file.display());
                }
                text.push('\n');
            });
            // Ours, down to the signal frame, are of no interest.
            if started {
                write_all_stderr(text.as_bytes());
                shown += 1;
            } else if text.contains("on_fault") {
                started = true;
            }
            shown < TRACE_FRAMES
        });
    }
    write_stderr(format_args!("  ...\n"));
}
