//! Stack overflow: a report that names the goroutine.
//!
//! A goroutine that touches the guard of its stack gets SIGSEGV. The handler runs on the thread's
//! alternate stack. If the address is in a guard of the stack arena, it prints the goroutine and
//! its trace, and aborts. Any other fault goes to the previous handler (`previous_action.rs`). A
//! handler that is installed later may call this one for faults that are not its own.
//!
//! Nothing before the first message allocates. The trace does, and the goroutine may have been
//! inside malloc when its stack overflowed. So the message comes first, and SIGALRM ends the
//! process if the trace takes longer than [`TRACE_LIMIT_SECS`].

use super::previous_action::{PreviousAction, SignalSource};
use super::symbols::Resolver;
use super::unwind::{OwnAddress, own_stack};
use crate::mem;
use crate::sched::current_g;
use crate::sys::stderr::{write_all_stderr, write_stderr};
use std::ffi::{c_int, c_void};
use std::fmt::Write;
use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::Once;
use trefoil_base::symbols::demangle;

/// Frames that are printed. The innermost frames show the recursion.
const TRACE_FRAMES: usize = 48;
/// Frames of this handler, and of handlers that have called it, that are left out at most.
const HANDLER_FRAMES_MAX: usize = 16;
/// How long the trace may take before the process ends without it. A busy machine needs more than
/// ten seconds to read the debug information of a large program.
const TRACE_LIMIT_SECS: u32 = 30;

static INSTALL: Once = Once::new();
/// The actions that were installed before, of SIGSEGV and SIGBUS.
static PREVIOUS: [PreviousAction; 2] = [const { PreviousAction::new() }; 2];

/// Installs the handler, once.
pub(crate) fn install_handler() {
    INSTALL.call_once(|| {
        for (previous, signal) in PREVIOUS.iter().zip([libc::SIGSEGV, libc::SIGBUS]) {
            // SAFETY: the action is made here, and its handler has the type that SA_SIGINFO needs.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, std::ptr::null(), &raw mut action);
                previous.set(&action);
                action.sa_sigaction = on_fault as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                libc::sigemptyset(&raw mut action.sa_mask);
                libc::sigaction(signal, &raw const action, null_mut());
            }
        }
    });
}

unsafe extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo. A signal that a process has sent (code 0 or below)
    // has no address.
    let address = unsafe { ((*info).si_code > 0).then(|| (*info).si_addr() as usize) };
    if let Some(slot) = address.and_then(mem::guard_hit) {
        report_overflow(slot.size);
    }
    let source = if address.is_some() { SignalSource::Fault } else { SignalSource::Sent };
    let previous = &PREVIOUS[usize::from(signal != libc::SIGSEGV)];
    // SAFETY: the arguments are those of this handler.
    unsafe { previous.pass_on(signal, info, context, source) };
}

/// Reports that the goroutine has overflowed its stack of `size` bytes, and aborts.
#[cold]
fn report_overflow(size: usize) -> ! {
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
    // SAFETY: sets a timer whose signal ends the process if the trace hangs in malloc.
    unsafe {
        libc::signal(libc::SIGALRM, libc::SIG_DFL);
        libc::alarm(TRACE_LIMIT_SECS);
    }
    print_trace();
    std::process::abort();
}

/// Prints the innermost frames of the goroutine, without those of the signal handler.
fn print_trace() {
    let mut addresses = [OwnAddress::Call(0); HANDLER_FRAMES_MAX + TRACE_FRAMES];
    let len = own_stack(&mut addresses);
    // The frames of this handler come before the one that the signal has interrupted.
    let is_interrupted = |address: &OwnAddress| matches!(address, OwnAddress::Interrupted(_));
    let first = addresses[..len].iter().position(is_interrupted).unwrap_or(0);
    // The goroutine may have overflowed its stack in the resolver. It is not unlocked: the process
    // ends here.
    let mut resolver = ManuallyDrop::new(Resolver::try_lock());
    let mut text = String::new();
    for (number, address) in addresses[first..len].iter().take(TRACE_FRAMES).enumerate() {
        text.clear();
        let address = address.address();
        if let Some(resolver) = &mut *resolver {
            resolver.calls(address, &mut |call| {
                let name = call.name.map_or_else(|| format!("{address:#x}"), demangle);
                let _ = writeln!(text, "  {number:>3}: {name}");
                if !call.file.is_empty() && call.line != 0 {
                    let _ = writeln!(text, "         at {}:{}", call.file, call.line);
                }
            });
        }
        if text.is_empty() {
            write_stderr(format_args!("  {number:>3}: {address:#x}\n"));
        } else {
            write_all_stderr(text.as_bytes());
        }
    }
    write_stderr(format_args!("  ...\n"));
}
