//! Stack overflow: which goroutine it was.
//!
//! A goroutine that runs into its guard gets SIGSEGV. The handler runs on the thread's alternate stack,
//! sees that the address lies in a guard of the arena, says whose stack it was, prints its trace and
//! aborts. Any other fault goes to the handler that was there before us (std's, or the user's).
//!
//! Nothing before the first message allocates. The trace does; the goroutine may have been inside
//! malloc when it overflowed, so the message comes first and the trace is given [`TRACE_LIMIT_SECS`]:
//! then SIGALRM ends the process.

use crate::mem;
use crate::sched::current_g;
use crate::sys::stderr::{write_all_stderr, write_stderr};
use std::ffi::{c_int, c_void};
use std::fmt::Write;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::Once;

/// Frames of an overflow that are printed: the innermost show the recursion.
const TRACE_FRAMES: usize = 48;
/// How long the trace may take before the process ends without it.
const TRACE_LIMIT_SECS: u32 = 10;

static INSTALL: Once = Once::new();
/// The handlers before ours: SIGSEGV, SIGBUS. Written once, before ours is in place.
static mut BEFORE: [MaybeUninit<libc::sigaction>; 2] = [MaybeUninit::zeroed(); 2];

/// Puts our handler in, once.
pub(crate) fn install_handler() {
    INSTALL.call_once(|| {
        for (i, signal) in [libc::SIGSEGV, libc::SIGBUS].into_iter().enumerate() {
            // SAFETY: BEFORE[i] is written here only, before the handler that reads it is installed.
            unsafe {
                let before = (&raw mut BEFORE[i]).cast::<libc::sigaction>();
                libc::sigaction(signal, std::ptr::null(), before);
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = on_fault as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                libc::sigemptyset(&raw mut action.sa_mask);
                libc::sigaction(signal, &raw const action, null_mut());
            }
        }
    });
}

unsafe extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a valid siginfo.
    let address = unsafe { (*info).si_addr() as usize };
    match mem::guard_hit(address) {
        Some(slot) => overflow_slow(slot.size),
        // SAFETY: passed on as it came.
        None => unsafe { pass_on(signal, info, context) },
    }
}

/// To whoever handled this signal before us.
unsafe fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: written before this handler was installed.
    let before = unsafe {
        (&raw const BEFORE[usize::from(signal != libc::SIGSEGV)]).cast::<libc::sigaction>().read()
    };
    if before.sa_sigaction == libc::SIG_DFL || before.sa_sigaction == libc::SIG_IGN {
        // SAFETY: the default action; returning repeats the fault under it.
        unsafe { libc::sigaction(signal, &raw const before, null_mut()) };
    } else if before.sa_flags & libc::SA_SIGINFO != 0 {
        type Handler = unsafe extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
        // SAFETY: its owner said so by SA_SIGINFO.
        unsafe { std::mem::transmute::<usize, Handler>(before.sa_sigaction)(signal, info, context) }
    } else {
        type Handler = unsafe extern "C" fn(c_int);
        // SAFETY: its owner said so by the absence of SA_SIGINFO.
        unsafe { std::mem::transmute::<usize, Handler>(before.sa_sigaction)(signal) }
    }
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
