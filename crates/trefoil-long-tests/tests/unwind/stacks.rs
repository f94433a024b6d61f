//! Compares real stacks.

use super::File;
use super::reference::Reference;
use std::arch::asm;
use std::ffi::{CStr, OsStr, c_int, c_void};
use std::hint::black_box;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Instant;
use trefoil_base::symbols::{CodeAddress, Cpu, NoCaller, RegisterValue, Registers, UnwindTables};

/// How deep the recursion is.
const DEPTH: u32 = 200;

/// Returns the paths of the loaded objects, and what is added to their addresses. The vdso has no
/// file.
fn objects() -> Vec<(PathBuf, u64)> {
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _: usize,
        objects: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader's description, and the argument below.
        let (info, objects) = unsafe { (&*info, &mut *objects.cast::<Vec<(PathBuf, u64)>>()) };
        // SAFETY: a string of the loader.
        let name = unsafe { CStr::from_ptr(info.dlpi_name) };
        let path = match objects.is_empty() {
            true => std::env::current_exe().unwrap(),
            false => PathBuf::from(OsStr::from_bytes(name.to_bytes())),
        };
        objects.push((path, info.dlpi_addr));
        0
    }
    let mut objects = Vec::new();
    // SAFETY: `visit` uses the argument by its type.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut objects).cast()) };
    objects
}

/// Returns the registers of the function that this is inlined into.
#[inline(always)]
fn own_registers() -> Registers {
    let (pc, sp, fp, lr): (u64, u64, u64, u64);
    let rbx;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: only reads registers.
    unsafe {
        asm!("lea {}, [rip]", "mov {}, rsp", "mov {}, rbp", out(reg) pc, out(reg) sp, out(reg) fp);
        lr = 0;
        let value: u64;
        asm!("mov {}, rbx", out(reg) value);
        rbx = RegisterValue::Known(value);
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: only reads registers.
    unsafe {
        asm!("adr {}, .", "mov {}, sp", "mov {}, x29", "mov {}, x30", out(reg) pc, out(reg) sp,
            out(reg) fp, out(reg) lr);
        rbx = RegisterValue::Unknown;
    }
    Registers { pc, sp, fp, lr, rbx }
}

/// Reads this thread's stack.
fn word(address: u64) -> Option<u64> {
    let here = &raw const address as u64;
    let is_readable = address > here && address < here + (1 << 20) && address.is_multiple_of(8);
    // SAFETY: at most 1 MiB above; the callers below are on a stack of 8 MiB, in its lower part.
    is_readable.then(|| unsafe { (address as *const u64).read_volatile() })
}

/// A function that finds a caller.
type FindCaller<'a> = &'a mut dyn FnMut(
    CodeAddress,
    &mut Registers,
    &mut dyn FnMut(u64) -> Option<u64>,
) -> Result<Option<CodeAddress>, NoCaller>;

/// Returns the return addresses on a stack.
fn callers(mut registers: Registers, find: FindCaller<'_>) -> (Vec<u64>, bool) {
    let mut at = CodeAddress::of_instruction(registers.pc);
    let mut addresses = Vec::new();
    loop {
        match find(at, &mut registers, &mut word) {
            Ok(Some(caller)) => {
                addresses.push(caller.address());
                at = caller;
            }
            end => return (addresses, end == Ok(None)),
        }
    }
}

type Visit = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;

unsafe extern "C" {
    fn _Unwind_Backtrace(visit: Visit, argument: *mut c_void) -> c_int;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
}

/// Returns the return addresses on the caller's stack, the caller's own first, as the unwinder
/// finds them that std uses for panics.
#[inline(never)]
fn callers_by_std() -> Vec<u64> {
    unsafe extern "C" fn visit(context: *mut c_void, addresses: *mut c_void) -> c_int {
        // SAFETY: the unwinder's context, and the argument below.
        let (ip, addresses) =
            unsafe { (_Unwind_GetIP(context), &mut *addresses.cast::<Vec<u64>>()) };
        addresses.push(ip as u64);
        0
    }
    let mut addresses = Vec::new();
    // SAFETY: `visit` uses the argument by its type.
    unsafe { _Unwind_Backtrace(visit, (&raw mut addresses).cast()) };
    // The first is in this function, and the second in the caller.
    addresses.retain(|&address| address != 0);
    addresses.split_off(2)
}

/// Calls itself, at different places and with frames of different sizes, and then `inner`.
#[inline(never)]
fn descend(depth: u32, inner: &mut dyn FnMut()) -> u32 {
    match depth {
        0 => {
            inner();
            0
        }
        _ if depth.is_multiple_of(3) => {
            let room = black_box([depth; 100]);
            descend(depth - 1, inner) + room[7]
        }
        _ if depth.is_multiple_of(2) => {
            // By libc's code, which has no frame pointer.
            unsafe extern "C" fn compare(left: *const c_void, _: *const c_void) -> c_int {
                // SAFETY: an element of the array below.
                let (inner, depth) = unsafe { &mut *left.cast_mut().cast::<(Inner<'_>, u32)>() };
                if let Some(inner) = inner.take() {
                    *depth = descend(*depth, inner);
                }
                0
            }
            type Inner<'a> = Option<&'a mut dyn FnMut()>;
            let mut array: (Inner<'_>, u32) = (Some(inner), depth - 1);
            let at = (&raw mut array).cast::<c_void>();
            // SAFETY: an array of one element, which is the key as well.
            unsafe { libc::bsearch(at, at, 1, size_of_val(&array), Some(compare)) };
            array.1 + 1
        }
        _ => black_box(descend(depth - 1, inner)) + 1,
    }
}

struct Unwinders {
    own: UnwindTables,
    reference: Reference,
}

fn unwinders() -> Unwinders {
    let mut all =
        Unwinders { own: UnwindTables::new(Cpu::OWN), reference: Reference::new(Cpu::OWN) };
    for (path, bias) in objects() {
        if let Some(file) = File::read(Path::new(&path)) {
            all.own.add(file.module(bias));
            all.reference.add(&file, bias);
        }
    }
    all
}

/// Runs a function on a large stack, in a deep recursion.
fn deep(inner: impl FnOnce() + Send) {
    let mut inner = Some(inner);
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(8 << 20);
        let run = move || {
            black_box(descend(DEPTH, &mut || inner.take().unwrap()()));
        };
        thread.spawn_scoped(scope, run).unwrap();
    });
}

#[test]
fn the_callers_of_a_deep_recursion_are_those_that_std_finds() {
    deep(|| {
        let mut all = unwinders();
        let registers = own_registers();
        let expected = callers_by_std();
        let (own, is_end) = callers(registers, &mut |at, r, word| all.own.caller(at, r, word));
        let (other, _) = callers(registers, &mut |at, r, word| all.reference.caller(at, r, word));
        assert!(own.len() > DEPTH as usize, "{}", own.len());
        // The others may leave out the code that begins a thread. On aarch64 it has no table, and
        // framehop ends at the frame whose caller has no frame pointer.
        for others in [expected, other] {
            let (common, rest) = own.split_at(others.len().min(own.len()));
            assert!(common == others && rest.len() <= 1, "{own:x?} {others:x?}");
        }
        assert!(is_end || Cpu::OWN == Cpu::Aarch64, "the end of the stack is not found");
    });
}

/// Functions whose callers need more than the stack pointer and the frame pointer.
#[cfg(target_arch = "x86_64")]
mod special {
    use super::*;
    use std::arch::naked_asm;
    use std::cell::RefCell;
    use std::mem::zeroed;
    use std::ptr::null_mut;

    /// Calls a function with a frame that is found by rbx, like `_dl_runtime_resolve` of glibc.
    /// Its frame pointer leads nowhere.
    #[unsafe(naked)]
    unsafe extern "C" fn call_with_frame_in_rbx(function: extern "C" fn()) {
        naked_asm!(
            ".cfi_startproc",
            "push rbp",
            ".cfi_adjust_cfa_offset 8",
            ".cfi_rel_offset rbp, 0",
            "push rbx",
            ".cfi_adjust_cfa_offset 8",
            ".cfi_rel_offset rbx, 0",
            "mov rbx, rsp",
            ".cfi_def_cfa_register rbx",
            "and rsp, -64",
            "sub rsp, 192",
            "mov ebp, 8",
            "call rdi",
            "mov rsp, rbx",
            ".cfi_def_cfa_register rsp",
            "pop rbx",
            ".cfi_adjust_cfa_offset -8",
            ".cfi_restore rbx",
            "pop rbp",
            ".cfi_adjust_cfa_offset -8",
            ".cfi_restore rbp",
            "ret",
            ".cfi_endproc",
        )
    }

    /// Calls a function with another value in rbx.
    #[unsafe(naked)]
    unsafe extern "C" fn call_with_another_rbx(function: extern "C" fn()) {
        naked_asm!(
            ".cfi_startproc",
            "push rbx",
            ".cfi_adjust_cfa_offset 8",
            ".cfi_rel_offset rbx, 0",
            "mov ebx, 24",
            "call rdi",
            "pop rbx",
            ".cfi_adjust_cfa_offset -8",
            ".cfi_restore rbx",
            "ret",
            ".cfi_endproc",
        )
    }

    /// Raises a signal by its first instruction, which belongs to another row than the code before
    /// it: there the frame is far larger.
    #[unsafe(naked)]
    unsafe extern "C" fn interrupted_at_once() {
        naked_asm!(
            // The function that is before it.
            ".cfi_startproc",
            ".cfi_def_cfa_offset 4096",
            "nop",
            ".cfi_endproc",
            ".globl trefoil_test_interrupted_at_once",
            ".hidden trefoil_test_interrupted_at_once",
            "trefoil_test_interrupted_at_once:",
            ".cfi_startproc",
            "ud2",
            "ret",
            ".cfi_endproc",
        )
    }

    unsafe extern "C" {
        /// The function in the middle of [`interrupted_at_once`].
        fn trefoil_test_interrupted_at_once();
    }

    /// What [`compare`] has found.
    struct Found {
        own: Vec<u64>,
        /// By std.
        expected: Vec<u64>,
        /// Whether ours has found the end of the stack.
        is_end: bool,
    }

    thread_local! {
        static FOUND: RefCell<Vec<Found>> = const { RefCell::new(Vec::new()) };
    }

    #[inline(never)]
    extern "C" fn compare() {
        let mut all = unwinders();
        let registers = own_registers();
        let expected = callers_by_std();
        let find: FindCaller<'_> = &mut |at, r, word| all.own.caller(at, r, word);
        let (own, is_end) = callers(registers, find);
        FOUND.with_borrow_mut(|found| found.push(Found { own, expected, is_end }));
    }

    fn assert_found(count: usize) {
        let all = FOUND.take();
        assert_eq!(all.len(), count);
        for Found { own, expected, is_end } in all {
            // std leaves out the code that begins a thread.
            let (common, rest) = own.split_at(expected.len().min(own.len()));
            assert!(common == expected && rest.len() <= 1, "{own:x?} {expected:x?}");
            assert!(is_end, "the end of the stack is not found");
        }
    }

    extern "C" fn compare_deeper() {
        // SAFETY: both call only the function.
        unsafe { call_with_another_rbx(compare) };
        black_box(());
    }

    extern "C" fn twice() {
        // SAFETY: as above.
        unsafe {
            call_with_another_rbx(compare_deeper);
            call_with_frame_in_rbx(compare_deeper);
        }
        black_box(());
    }

    #[test]
    fn callers_above_a_frame_in_rbx_are_those_that_std_finds() {
        deep(|| {
            // SAFETY: as above.
            unsafe {
                call_with_frame_in_rbx(compare);
                call_with_frame_in_rbx(compare_deeper);
                call_with_frame_in_rbx(twice);
            }
            assert_found(4);
        });
    }

    #[test]
    fn callers_above_an_interrupted_first_instruction_are_those_that_std_finds() {
        unsafe extern "C" fn handle(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
            compare();
            const UD2_BYTES: i64 = 2;
            // SAFETY: the kernel's record of the thread that has run `ud2`.
            let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
            context.uc_mcontext.gregs[libc::REG_RIP as usize] += UD2_BYTES;
        }
        extern "C" fn interrupt() {
            // SAFETY: the handler skips the instruction.
            unsafe { trefoil_test_interrupted_at_once() };
            black_box(());
        }
        black_box(interrupted_at_once as *const ());
        // SAFETY: zeros are valid.
        let mut old: libc::sigaction = unsafe { zeroed() };
        // SAFETY: a handler on the thread's own stack, of a signal that nothing else uses here.
        unsafe {
            let mut action: libc::sigaction = zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGILL, &raw const action, &raw mut old), 0);
        }
        deep(|| {
            interrupt();
            // SAFETY: both call only the function. A frame in rbx is above that of the signal.
            unsafe {
                call_with_another_rbx(interrupt);
                call_with_frame_in_rbx(interrupt);
            }
            assert_found(3);
        });
        // SAFETY: what it was before.
        assert_eq!(unsafe { libc::sigaction(libc::SIGILL, &raw const old, null_mut()) }, 0);
    }
}

#[test]
#[ignore = "only prints"]
fn print_timings_of_unwinding() {
    /// The least time of some short ones is hardly longer on a busy machine.
    const TURNS: u32 = 200;
    const ROUNDS: u32 = 50;
    deep(|| {
        let mut all = unwinders();
        let registers = own_registers();
        let frames = callers_by_std().len() as f64;
        let mut least = [f64::INFINITY; 2];
        let mut nanos = |number: usize, find: FindCaller<'_>| {
            let began = Instant::now();
            for _ in 0..ROUNDS {
                black_box(callers(registers, find));
            }
            let nanos = began.elapsed().as_nanos() as f64 / f64::from(ROUNDS) / frames;
            least[number] = least[number].min(nanos);
        };
        for _ in 0..TURNS {
            nanos(0, &mut |at, r, word| all.own.caller(at, r, word));
            nanos(1, &mut |at, r, word| all.reference.caller(at, r, word));
        }
        println!("{:.1} ns per frame that is cached, framehop {:.1} ns", least[0], least[1]);
    });
    // Each address only once: nothing is cached.
    let Unwinders { mut own, mut reference } = unwinders();
    let (path, bias) = objects().swap_remove(0);
    let file = File::read(&path).unwrap();
    let text = file.code.iter().max_by_key(|range| range.end - range.start).unwrap().clone();
    for _ in 0..3 {
        let mut nanos = [0.0; 2];
        let count = text.clone().step_by(31).count() as f64;
        for (nanos, is_own) in nanos.iter_mut().zip([true, false]) {
            let began = Instant::now();
            for address in text.clone().step_by(31) {
                let at = CodeAddress::of_instruction(bias + address);
                let mut registers = Registers {
                    pc: at.address(),
                    sp: 8,
                    fp: 8,
                    lr: 8,
                    rbx: RegisterValue::Known(8),
                };
                let mut word = |address| Some(address + 8);
                let _ = black_box(match is_own {
                    true => own.caller(at, &mut registers, &mut word),
                    false => reference.caller(at, &mut registers, &mut word),
                });
            }
            *nanos = began.elapsed().as_nanos() as f64 / count;
        }
        println!("{:.0} ns per frame that is not cached, framehop {:.0} ns", nanos[0], nanos[1]);
    }
}
