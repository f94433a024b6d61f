//! Compares real stacks.

use super::File;
use super::reference::Reference;
use std::arch::asm;
use std::ffi::{CStr, OsStr, c_int, c_void};
use std::hint::black_box;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Instant;
use trefoil_symbols::{CodeAddress, Cpu, NoCaller, Registers, UnwindTables};

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
    #[cfg(target_arch = "x86_64")]
    // SAFETY: only reads registers.
    unsafe {
        asm!("lea {}, [rip]", "mov {}, rsp", "mov {}, rbp", out(reg) pc, out(reg) sp, out(reg) fp);
        lr = 0;
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: only reads registers.
    unsafe {
        asm!("adr {}, .", "mov {}, sp", "mov {}, x29", "mov {}, x30", out(reg) pc, out(reg) sp,
            out(reg) fp, out(reg) lr);
    }
    Registers { pc, sp, fp, lr }
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
) -> Result<Option<u64>, NoCaller>;

/// Returns the return addresses on a stack.
fn callers(mut registers: Registers, find: FindCaller<'_>) -> (Vec<u64>, bool) {
    let mut at = CodeAddress::of_instruction(registers.pc);
    let mut addresses = Vec::new();
    loop {
        match find(at, &mut registers, &mut word) {
            Ok(Some(caller)) => {
                addresses.push(caller);
                at = CodeAddress::of_return(caller).unwrap();
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

#[test]
#[ignore = "only prints"]
fn print_timings_of_unwinding() {
    const ROUNDS: u32 = 2000;
    deep(|| {
        let mut all = unwinders();
        let registers = own_registers();
        let frames = callers_by_std().len() as f64;
        for _ in 0..3 {
            let began = Instant::now();
            for _ in 0..ROUNDS {
                black_box(callers(registers, &mut |at, r, word| all.own.caller(at, r, word)));
            }
            let own = began.elapsed().as_nanos() as f64 / f64::from(ROUNDS) / frames;
            let began = Instant::now();
            for _ in 0..ROUNDS {
                let find: FindCaller<'_> = &mut |at, r, word| all.reference.caller(at, r, word);
                black_box(callers(registers, find));
            }
            let other = began.elapsed().as_nanos() as f64 / f64::from(ROUNDS) / frames;
            println!("{own:.1} ns per frame that is cached, framehop {other:.1} ns");
        }
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
                let mut registers = Registers { pc: at.address(), sp: 8, fp: 8, lr: 8 };
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
