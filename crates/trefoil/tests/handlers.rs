//! Signal handlers, alternate stacks and panic hooks of the program beside those of the runtime.

mod common;

use common::raw::raw_sleep;
use common::{child_test, join_all, mark, tasks, test_name, watchdog};
use std::ffi::c_void;
use std::hint::black_box;
use std::mem::transmute;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::signal::{self, SIGUSR1, SIGUSR2};
use trefoil::{Builder, Runtime, go, yield_now};

fn runtime() -> Runtime {
    Runtime::builder().procs(2).build().unwrap()
}

/// Waits until `count()` is at most `left`.
fn wait_for_threads(left: usize, count: impl Fn() -> usize) {
    let start = Instant::now();
    while count() > left {
        assert!(start.elapsed() < Duration::from_secs(20), "threads are left: {:?}", tasks());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Restores the default action of SIGQUIT, without a core file. For children, before the first
/// runtime: a shell starts background jobs with the signal ignored, which the runtime respects.
fn use_default_sigquit() {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: passes a struct by reference; the default action.
    unsafe {
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
        libc::signal(libc::SIGQUIT, libc::SIG_DFL);
    }
}

#[test]
fn sigquit_ends_the_process_after_the_last_runtime() {
    child_test!(|child| {
        let out = child.output();
        assert_eq!(out.status.signal(), Some(libc::SIGQUIT), "{:?}", out.status);
    });
    use_default_sigquit();
    let threads = tasks().len();
    for _ in 0..3 {
        runtime().run(|| join_all((0..10).map(|_| go(yield_now))));
    }
    wait_for_threads(threads, || tasks().len());
    // SAFETY: a signal to this process.
    unsafe { libc::kill(libc::getpid(), libc::SIGQUIT) };
    std::thread::sleep(Duration::from_secs(20));
}

/// Forks a process that waits for a signal, sends the signal, and returns the exit status.
fn status_of_fork_after(signal: i32) -> ExitStatus {
    let mut status = 0;
    // SAFETY: the forked process makes system calls only.
    unsafe {
        let pid = libc::fork();
        if pid == 0 {
            (0..100).for_each(|_| _ = raw_sleep(Duration::from_millis(50)));
            libc::_exit(7);
        }
        assert!(pid > 0);
        libc::kill(pid, signal);
        assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
    }
    ExitStatus::from_raw(status)
}

#[test]
fn sigquit_ends_a_fork_of_the_process() {
    child_test!();
    use_default_sigquit();
    let runtime = runtime();
    let of_goroutine = runtime.run(|| status_of_fork_after(libc::SIGQUIT));
    assert_eq!(of_goroutine.signal(), Some(libc::SIGQUIT), "{of_goroutine:?}");
    let of_thread = status_of_fork_after(libc::SIGQUIT);
    assert_eq!(of_thread.signal(), Some(libc::SIGQUIT), "{of_thread:?}");
}

/// A fork wrote its signals to the pipe that it shares with its parent, and went on itself.
#[test]
fn signals_of_a_fork_have_their_previous_effect_and_stay_there() {
    extern "C" fn ends_the_fork(_: i32) {
        let code = if signal_mask() & bit(SIGUSR1) != 0 { 3 } else { 4 };
        // SAFETY: ends the process.
        unsafe { libc::_exit(code) };
    }
    child_test!();
    install(SIGUSR2, ends_the_fork as *const () as usize, 0, &[SIGUSR1]);
    runtime().run(|| {
        let signals = signal::notify(&[SIGUSR1, SIGUSR2]).unwrap();
        let default = status_of_fork_after(SIGUSR1);
        assert_eq!(default.signal(), Some(SIGUSR1), "{default:?}");
        let handled = status_of_fork_after(SIGUSR2);
        assert_eq!(handled.code(), Some(3), "{handled:?}");
        // SAFETY: a signal to this process.
        unsafe { libc::kill(libc::getpid(), SIGUSR1) };
        assert_eq!(signals.recv(), Ok(SIGUSR1));
        // The fork's signal was sent long before: it would have come first, or comes now.
        std::thread::sleep(Duration::from_millis(50));
        assert!(signals.try_recv().is_err());
    });
}

/// The signal stopped the fork only once: the default action took the place of the handler.
#[test]
fn a_fork_is_stopped_by_a_signal_that_its_parent_listens_to() {
    child_test!();
    runtime().run(|| {
        let _signals = signal::notify(&[libc::SIGTSTP]).unwrap();
        // SAFETY: the forked process makes system calls only; signals to that process.
        unsafe {
            let pid = libc::fork();
            if pid == 0 {
                // A group whose parent is in another one of the session: only such a group stops.
                libc::setpgid(0, 0);
                (0..400).for_each(|_| _ = raw_sleep(Duration::from_millis(50)));
                libc::_exit(7);
            }
            assert!(pid > 0);
            libc::setpgid(pid, pid);
            for _ in 0..3 {
                libc::kill(pid, libc::SIGTSTP);
                let mut status = 0;
                assert_eq!(libc::waitpid(pid, &raw mut status, libc::WUNTRACED), pid);
                let status = ExitStatus::from_raw(status);
                assert_eq!(status.stopped_signal(), Some(libc::SIGTSTP), "{status:?}");
                libc::kill(pid, libc::SIGCONT);
            }
            libc::kill(pid, libc::SIGKILL);
            assert_eq!(libc::waitpid(pid, std::ptr::null_mut(), 0), pid);
        }
    });
}

/// The watch that `TREFOIL_TRACE` asks for stayed when its runtime had ended: the signal was
/// swallowed.
#[test]
fn a_watched_signal_has_its_previous_effect_after_the_last_runtime() {
    child_test!(|child| {
        let folder = std::env::temp_dir();
        let out = child
            .env("TREFOIL_TRACE", &format!("on=signal:USR1,dir={}", folder.display()))
            .output();
        assert_eq!(out.status.signal(), Some(SIGUSR1), "{:?}", out.status);
    });
    let threads = tasks().len();
    runtime().run(|| go(yield_now).join().unwrap());
    wait_for_threads(threads, || tasks().len());
    // SAFETY: a signal to this process.
    unsafe { libc::kill(libc::getpid(), SIGUSR1) };
    std::thread::sleep(Duration::from_secs(20));
}

#[test]
fn sigquit_reaches_an_older_runtime_after_a_newer_one_has_ended() {
    child_test!(|child| {
        let text = child.fail(2);
        assert!(text.contains("SIGQUIT: quit"), "{text}");
        assert!(text.contains("goroutine 1"), "{text}");
    });
    use_default_sigquit();
    let older = runtime();
    older.run(|| {
        // Long enough for its threads to get their names.
        runtime().run(|| std::thread::sleep(Duration::from_millis(20)));
        wait_for_threads(1, || tasks().iter().filter(|(_, name)| name == "trefoil-helper").count());
        // SAFETY: a signal to this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGQUIT) };
        std::thread::sleep(Duration::from_secs(20));
    });
}

/// Starts goroutines, and with them the runtime, when it is dropped.
struct StartsInDrop;

impl Drop for StartsInDrop {
    fn drop(&mut self) {
        let (tx, rx) = trefoil::chan::bounded(0);
        let sender = go(move || tx.send(41).unwrap());
        assert_eq!(rx.recv(), Ok(41));
        sender.join().unwrap();
        assert!(go(|| panic!("on a goroutine")).join().is_err());
        mark("the destructor is done");
    }
}

#[test]
fn a_runtime_starts_during_unwinding() {
    child_test!(|child| {
        let text = child.succeed();
        assert!(text.contains("the destructor is done"), "{text}");
        assert!(text.contains("goroutine "), "the hook is not in place: {text}");
    });
    let panicked = std::panic::catch_unwind(|| {
        let _starts = StartsInDrop;
        panic!("on a plain thread");
    });
    assert!(panicked.is_err());
}

#[test]
fn a_runtime_starts_in_a_panic_hook() {
    child_test!(|child| {
        let text = child.succeed();
        assert!(text.contains("the destructor is done"), "{text}");
    });
    std::panic::set_hook(Box::new(|_| {
        if std::thread::current().name() == Some(test_name!()) {
            assert_eq!(go(|| 6 * 7).join().unwrap(), 42);
            mark("the destructor is done");
        }
    }));
    assert!(std::panic::catch_unwind(|| panic!("on a plain thread")).is_err());
    // Afterwards the runtime installs its own hook.
    assert!(go(|| panic!("on a goroutine")).join().is_err());
}

/// Faults, and continues where a handler leads it: at the address in x2. Every other register may
/// be lost.
#[cfg(target_arch = "aarch64")]
fn fault_and_continue() {
    // SAFETY: writes to an address that is not mapped; a handler continues at `2:`.
    unsafe {
        std::arch::asm!(
            "stp x19, x29, [sp, #-16]!",
            "adr x2, 2f",
            "mov x0, #8",
            "strb wzr, [x0]",
            "2:",
            "ldp x19, x29, [sp], #16",
            clobber_abi("C"), out("x20") _, out("x21") _, out("x22") _, out("x23") _,
            out("x24") _, out("x25") _, out("x26") _, out("x27") _, out("x28") _,
        );
    }
}

/// Returns where the interrupted code wants to continue, and its stack pointer.
#[cfg(target_arch = "aarch64")]
fn continuation(context: &libc::ucontext_t) -> (u64, u64) {
    (context.uc_mcontext.regs[2], context.uc_mcontext.sp)
}

/// Sets the interrupted program counter.
#[cfg(target_arch = "aarch64")]
fn set_pc(context: &mut libc::ucontext_t, pc: u64) {
    context.uc_mcontext.pc = pc;
}

/// Continues at `to`, with this stack pointer.
///
/// # Safety
/// `to` is code that expects that stack pointer.
#[cfg(target_arch = "aarch64")]
unsafe fn jump(sp: u64, to: u64) -> ! {
    // SAFETY: the caller's stack pointer and code.
    unsafe {
        std::arch::asm!("mov sp, {sp}", "br {to}", sp = in(reg) sp, to = in(reg) to,
        options(noreturn))
    }
}

/// Returns where the interrupted code wants to continue, and its stack pointer.
#[cfg(target_arch = "x86_64")]
fn continuation(context: &libc::ucontext_t) -> (u64, u64) {
    let registers = &context.uc_mcontext.gregs;
    (registers[libc::REG_RDX as usize] as u64, registers[libc::REG_RSP as usize] as u64)
}

/// Sets the interrupted program counter.
#[cfg(target_arch = "x86_64")]
fn set_pc(context: &mut libc::ucontext_t, pc: u64) {
    context.uc_mcontext.gregs[libc::REG_RIP as usize] = pc as i64;
}

/// Continues at `to`, with this stack pointer.
///
/// # Safety
/// `to` is code that expects that stack pointer.
#[cfg(target_arch = "x86_64")]
unsafe fn jump(sp: u64, to: u64) -> ! {
    // SAFETY: the caller's contract.
    unsafe {
        std::arch::asm!("mov rsp, {sp}", "jmp {to}", sp = in(reg) sp, to = in(reg) to,
        options(noreturn))
    }
}

/// Faults, and continues where a handler leads it: at the address in rdx. Every other register may
/// be lost.
#[cfg(target_arch = "x86_64")]
fn fault_and_continue() {
    // SAFETY: writes to an address that is not mapped; a handler continues at `2:`.
    unsafe {
        std::arch::asm!(
            "push rbx", "push rbp",
            "lea rdx, [rip + 2f]",
            "mov eax, 8",
            "mov byte ptr [rax], 1",
            "2:",
            "pop rbp", "pop rbx",
            clobber_abi("C"), out("r12") _, out("r13") _, out("r14") _, out("r15") _,
        );
    }
}

/// How a handler returns to the code that faulted.
const RETURNS: usize = 0;
const JUMPS: usize = 1;
static WAY: AtomicUsize = AtomicUsize::new(RETURNS);
static CALLS: AtomicUsize = AtomicUsize::new(0);
/// The bits that were set in all signal masks of handlers, and in any of them.
static MASK_ALL: AtomicU64 = AtomicU64::new(!0);
static MASK_ANY: AtomicU64 = AtomicU64::new(0);

fn signal_mask() -> u64 {
    let mut mask = 0u64;
    // SAFETY: reads the mask into a word of the size of the kernel's signal set.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, 0, &raw mut mask, 8) };
    mask
}

fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

unsafe extern "C" fn on_fault(_: i32, _: *mut libc::siginfo_t, context: *mut c_void) {
    CALLS.fetch_add(1, SeqCst);
    MASK_ALL.fetch_and(signal_mask(), SeqCst);
    MASK_ANY.fetch_or(signal_mask(), SeqCst);
    // SAFETY: the context of `fault_and_continue`, from the kernel.
    unsafe {
        let context = &mut *context.cast::<libc::ucontext_t>();
        let (to, sp) = continuation(context);
        if WAY.load(SeqCst) == RETURNS {
            return set_pc(context, to);
        }
        // Like longjmp: no return from the signal.
        jump(sp, to);
    }
}

/// Installs a handler and returns the previous action.
fn install(signal: i32, handler: usize, flags: i32, mask: &[i32]) -> libc::sigaction {
    // SAFETY: valid actions; the handlers of these tests fit their flags.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        libc::sigemptyset(&raw mut action.sa_mask);
        mask.iter().for_each(|&s| _ = libc::sigaddset(&raw mut action.sa_mask, s));
        let mut before: libc::sigaction = std::mem::zeroed();
        assert_eq!(libc::sigaction(signal, &raw const action, &raw mut before), 0);
        before
    }
}

/// Faults often, on several goroutines, which must find their signal mask unchanged.
fn fault_on_goroutines() {
    const EACH: usize = 10;
    runtime().run(|| {
        let one = || {
            for _ in 0..EACH {
                let mask = signal_mask();
                fault_and_continue();
                assert_eq!(signal_mask(), mask);
                assert_eq!(signal_mask() & bit(libc::SIGSEGV), 0, "the signal is blocked");
                yield_now();
            }
        };
        join_all((0..20).map(|_| go(one)));
    });
    assert_eq!(CALLS.load(SeqCst), 20 * EACH);
}

#[test]
fn an_earlier_handler_gets_the_mask_that_it_asked_for() {
    child_test!();
    let handler = on_fault as *const () as usize;
    install(libc::SIGSEGV, handler, libc::SA_SIGINFO | libc::SA_NODEFER, &[libc::SIGUSR1]);
    fault_on_goroutines();
    let (all, any) = (MASK_ALL.load(SeqCst), MASK_ANY.load(SeqCst));
    assert_eq!(any & bit(libc::SIGSEGV), 0, "the signal was blocked despite SA_NODEFER");
    assert_ne!(all & bit(libc::SIGUSR1), 0, "the mask of the action was not added");
}

#[test]
fn an_earlier_handler_may_block_its_own_signal_in_spite_of_nodefer() {
    child_test!();
    let handler = on_fault as *const () as usize;
    install(libc::SIGSEGV, handler, libc::SA_SIGINFO | libc::SA_NODEFER, &[libc::SIGSEGV]);
    fault_on_goroutines();
    assert_ne!(
        MASK_ALL.load(SeqCst) & bit(libc::SIGSEGV),
        0,
        "the mask of the action was not added"
    );
}

#[test]
fn an_earlier_handler_without_nodefer_runs_with_its_signal_blocked() {
    child_test!();
    install(libc::SIGSEGV, on_fault as *const () as usize, libc::SA_SIGINFO, &[]);
    fault_on_goroutines();
    assert_ne!(MASK_ALL.load(SeqCst) & bit(libc::SIGSEGV), 0);
}

#[test]
fn an_earlier_handler_may_leave_by_a_jump() {
    child_test!();
    WAY.store(JUMPS, SeqCst);
    let handler = on_fault as *const () as usize;
    install(libc::SIGSEGV, handler, libc::SA_SIGINFO | libc::SA_NODEFER, &[]);
    fault_on_goroutines();
}

#[test]
fn an_earlier_handler_with_resethand_is_called_once() {
    child_test!(|child| {
        let out = child.output();
        let text = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.signal(), Some(libc::SIGSEGV), "{:?}: {text}", out.status);
        assert!(text.contains("after the first"), "{text}");
        assert!(!text.contains("after the second"), "{text}");
    });
    let handler = on_fault as *const () as usize;
    install(libc::SIGSEGV, handler, libc::SA_SIGINFO | libc::SA_RESETHAND, &[]);
    runtime()
        .run(|| {
            go(|| {
                fault_and_continue();
                mark("after the first");
                fault_and_continue();
                mark("after the second");
            })
            .join()
        })
        .unwrap();
}

#[test]
fn a_sent_sigsegv_has_the_action_from_before_the_runtime() {
    child_test!(|child| {
        let out = child.env("TREFOIL_TEST_ACTION", "default").output();
        assert_eq!(out.status.signal(), Some(libc::SIGSEGV), "{:?}", out.status);
        child.env("TREFOIL_TEST_ACTION", "ignore").succeed();
    });
    let ignore = std::env::var("TREFOIL_TEST_ACTION").unwrap() == "ignore";
    let action = if ignore { libc::SIG_IGN } else { libc::SIG_DFL };
    install(libc::SIGSEGV, action, 0, &[]);
    runtime().run(|| {
        // SAFETY: a signal to this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGSEGV) };
        // The kernel may choose any thread of the process, which takes the signal when it runs.
        let time = if ignore { Duration::from_millis(20) } else { Duration::from_secs(20) };
        std::thread::sleep(time);
    });
}

static LATER_CHAINS_TO: AtomicUsize = AtomicUsize::new(0);

/// Installed after the runtime's handler: handles its own faults and passes the others on.
unsafe extern "C" fn on_fault_later(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    type Handler = unsafe extern "C" fn(i32, *mut libc::siginfo_t, *mut c_void);
    // SAFETY: arguments from the kernel; the runtime's handler has this type (SA_SIGINFO).
    unsafe {
        if (*info).si_addr() as usize == 8 {
            return on_fault(signal, info, context);
        }
        let mask = signal_mask();
        transmute::<usize, Handler>(LATER_CHAINS_TO.load(SeqCst))(signal, info, context);
        assert_eq!(signal_mask(), mask);
    }
}

#[inline(never)]
fn recurse(depth: usize) -> usize {
    let frame = black_box([depth; 64]);
    if depth == 0 { frame[0] } else { recurse(depth - 1) + frame[63] }
}

#[test]
fn a_later_handler_may_pass_faults_on() {
    child_test!(|child| {
        let out = child.output();
        let text = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.signal(), Some(libc::SIGABRT), "{:?}: {text}", out.status);
        assert!(text.contains("200 faults"), "{text}");
        assert!(text.contains("\"deep\" overflowed its stack"), "{text}");
    });
    runtime().run(yield_now);
    let handler = on_fault_later as *const () as usize;
    let flags = libc::SA_SIGINFO | libc::SA_NODEFER;
    let before = install(libc::SIGSEGV, handler, flags, &[libc::SIGUSR1]);
    assert_ne!(before.sa_flags & libc::SA_SIGINFO, 0);
    LATER_CHAINS_TO.store(before.sa_sigaction, SeqCst);
    fault_on_goroutines();
    mark(&format!("{} faults", CALLS.load(SeqCst)));
    runtime().run(|| {
        let deep = Builder::new().name("deep").go(|| recurse(1 << 30)).unwrap();
        let _ = deep.join();
    });
}

/// Returns the alternate stack that the kernel has for this thread.
fn threads_alternate_stack() -> libc::stack_t {
    let mut stack = libc::stack_t { ss_sp: null_mut(), ss_flags: 0, ss_size: 0 };
    // SAFETY: writes one struct.
    unsafe { libc::syscall(libc::SYS_sigaltstack, 0, &raw mut stack) };
    stack
}

/// Returns the alternate stack that the goroutine sees.
fn alternate_stack() -> libc::stack_t {
    let mut stack = libc::stack_t { ss_sp: null_mut(), ss_flags: 0, ss_size: 0 };
    // SAFETY: writes one struct.
    assert_eq!(unsafe { libc::sigaltstack(null(), &raw mut stack) }, 0);
    stack
}

#[test]
fn alternate_stacks_of_runtime_threads_have_a_guard() {
    let _watchdog = watchdog();
    let low = runtime().run(|| {
        let low = threads_alternate_stack().ss_sp as usize;
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let end = format!("-{low:x} ");
        let below = maps.lines().find(|line| line.contains(&end)).map(str::to_owned);
        (low, below)
    });
    let (low, below) = (low.0, low.1.unwrap_or_default());
    assert!(below.contains(" ---p "), "below {low:x}: {below:?}");
}

static HANDLED_AT: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_usr1(_: i32) {
    let here = 0u8;
    HANDLED_AT.store(&raw const here as usize, SeqCst);
}

/// A library that takes the goroutine for a thread gives it an alternate stack, which ends with the
/// goroutine.
#[test]
fn an_alternate_stack_belongs_to_its_goroutine() {
    child_test!();
    const BYTES: usize = 128 << 10;
    install(libc::SIGUSR1, on_usr1 as *const () as usize, libc::SA_ONSTACK, &[]);
    let installs = || {
        let threads = threads_alternate_stack();
        assert_eq!(threads.ss_flags, 0);
        assert!(alternate_stack().ss_size >= 64 << 10, "too small for the libraries that check it");
        // SAFETY: new memory, unmapped at the end; signals to this thread.
        unsafe {
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let memory = libc::mmap(null_mut(), BYTES, prot, flags, -1, 0);
            let own = libc::stack_t { ss_sp: memory, ss_flags: 0, ss_size: BYTES };
            let mut before = alternate_stack();
            assert_eq!(libc::sigaltstack(&raw const own, &raw mut before), 0);
            for _ in 0..3 {
                yield_now();
                assert_eq!((alternate_stack().ss_sp, alternate_stack().ss_size), (memory, BYTES));
            }
            let small = libc::stack_t { ss_sp: memory, ss_flags: 0, ss_size: 100 };
            assert_eq!(libc::sigaltstack(&raw const small, null_mut()), -1);
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOMEM));
            libc::munmap(memory, BYTES);
            // The handler must not run on the unmapped stack.
            libc::raise(libc::SIGUSR1);
            let disabled =
                libc::stack_t { ss_sp: null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
            assert_eq!(libc::sigaltstack(&raw const disabled, null_mut()), 0);
            assert_eq!(alternate_stack().ss_flags, libc::SS_DISABLE);
            libc::raise(libc::SIGUSR1);
        }
        let stack = threads_alternate_stack();
        let range = stack.ss_sp as usize..stack.ss_sp as usize + stack.ss_size;
        assert_eq!(stack.ss_flags, 0);
        (HANDLED_AT.load(SeqCst), range)
    };
    Runtime::builder().procs(1).build().unwrap().run(move || {
        for _ in 0..20 {
            let (at, range) = go(installs).join().unwrap();
            assert!(range.contains(&at), "the handler ran at {at:x}, not in {range:x?}");
            // The next goroutine, which may have the same stack, must not see it.
            let next =
                go(|| (alternate_stack().ss_sp as usize, threads_alternate_stack().ss_sp as usize));
            let (its, threads) = next.join().unwrap();
            assert_eq!(its, threads);
        }
    });
}

/// What [`installs_on_fiber`] installs. The memory is never used.
const FIBERS_STACK: libc::stack_t = libc::stack_t {
    ss_sp: std::ptr::without_provenance_mut(1 << 20),
    ss_flags: 0,
    ss_size: 1 << 17,
};
/// 1 if the kernel had the fiber's alternate stack, 0 if not, -1 before the test.
static FIBER_CHANGED_THREAD: AtomicI32 = AtomicI32::new(-1);

extern "C" fn installs_on_fiber() {
    let before = threads_alternate_stack();
    // SAFETY: passes a struct by reference; no signal arrives before it is removed again.
    let installed = unsafe { libc::sigaltstack(&FIBERS_STACK, null_mut()) };
    let now = threads_alternate_stack();
    // SAFETY: restores the thread's stack, in case it was changed.
    unsafe { libc::syscall(libc::SYS_sigaltstack, &raw const before, 0) };
    let changed = installed != 0 || now.ss_sp != before.ss_sp;
    FIBER_CHANGED_THREAD.store(i32::from(changed), SeqCst);
}

/// Runs `f` on another stack, as libraries with fibers do.
fn run_on_fiber(f: extern "C" fn()) {
    let mut stack = vec![0u8; 256 << 10];
    // SAFETY: contexts and a stack that live until `f` has returned to `here`.
    unsafe {
        let mut here: libc::ucontext_t = std::mem::zeroed();
        let mut fiber: libc::ucontext_t = std::mem::zeroed();
        assert_eq!(libc::getcontext(&raw mut fiber), 0);
        fiber.uc_stack.ss_sp = stack.as_mut_ptr().cast();
        fiber.uc_stack.ss_size = stack.len();
        fiber.uc_link = &raw mut here;
        libc::makecontext(&raw mut fiber, f, 0);
        assert_eq!(libc::swapcontext(&raw mut here, &raw const fiber), 0);
    }
}

#[test]
fn an_alternate_stack_set_on_a_fiber_belongs_to_its_goroutine() {
    child_test!();
    Runtime::builder().procs(1).build().unwrap().run(|| {
        let one = go(|| {
            let _one_thread = trefoil::no_preempt();
            run_on_fiber(installs_on_fiber);
            alternate_stack().ss_sp == FIBERS_STACK.ss_sp
        });
        let is_kept = one.join().unwrap();
        assert_eq!(
            FIBER_CHANGED_THREAD.load(SeqCst),
            0,
            "the thread's alternate stack was changed"
        );
        assert!(is_kept, "the goroutine must see the alternate stack");
    });
}

/// The flags that a handler read with `sigaltstack`, and the error of its attempt to set them.
static HANDLERS_FLAGS: AtomicI32 = AtomicI32::new(0);
static HANDLERS_ERROR: AtomicI32 = AtomicI32::new(0);

extern "C" fn installs_in_handler(_: i32) {
    HANDLERS_FLAGS.store(alternate_stack().ss_flags, SeqCst);
    // SAFETY: passes a struct by reference; the kernel refuses it.
    let installed = unsafe { libc::sigaltstack(&FIBERS_STACK, null_mut()) };
    let error = std::io::Error::last_os_error().raw_os_error();
    HANDLERS_ERROR.store(if installed == 0 { 0 } else { error.unwrap_or(0) }, SeqCst);
}

#[test]
fn a_handler_on_the_alternate_stack_cannot_change_it() {
    child_test!();
    install(libc::SIGUSR1, installs_in_handler as *const () as usize, 0, &[]);
    runtime().run(|| {
        // SAFETY: a signal to this thread.
        go(|| unsafe { libc::raise(libc::SIGUSR1) }).join().unwrap();
    });
    assert_eq!(HANDLERS_FLAGS.load(SeqCst) & libc::SS_ONSTACK, libc::SS_ONSTACK);
    assert_eq!(HANDLERS_ERROR.load(SeqCst), libc::EPERM);
}
