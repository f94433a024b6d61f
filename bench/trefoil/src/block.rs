//! Calls that block in the kernel.

use std::arch::asm;
use std::sync::atomic::{AtomicBool, Ordering};

use bench_common::{Args, Meter, Report, size};
use trefoil::go;

use crate::clock::ticking;

fn blockers(call: fn()) {
    let blocker = move || {
        for _ in 0..size::BLOCKS_EACH {
            call();
        }
    };
    let handles: [_; size::BLOCKERS] = std::array::from_fn(|_| go(blocker));
    for handle in handles {
        handle.join().unwrap();
    }
}

fn measure(args: &Args, call: fn()) -> Report {
    let mut meter = Meter::new(args, size::BLOCKERS * size::BLOCKS_EACH);
    while meter.another_round() {
        blockers(call);
    }
    meter.report()
}

pub fn block_std(args: &Args) -> Report {
    measure(args, || std::thread::sleep(size::BLOCK))
}

/// A raw system call, which cannot be interposed.
pub fn block_raw(args: &Args) -> Report {
    static STOP: AtomicBool = AtomicBool::new(false);
    let ticker = go(|| ticking(|| STOP.load(Ordering::Relaxed)));
    let report = measure(args, raw_sleep);
    STOP.store(true, Ordering::Relaxed);
    report.with_lateness(ticker.join().unwrap())
}

fn raw_sleep() {
    const NANOSLEEP: i64 = 35;
    const INTERRUPTED: i64 = -4;
    // A `timespec`; the call leaves there what is left when a signal ends it early.
    let mut rest = [0i64, size::BLOCK.as_nanos() as i64];
    loop {
        let result: i64;
        // SAFETY: nanosleep reads and writes the one `timespec` that both arguments point to; the
        // kernel changes no registers but these.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") NANOSLEEP => result,
                in("rdi") &raw mut rest,
                in("rsi") &raw mut rest,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        if result != INTERRUPTED {
            return assert_eq!(result, 0);
        }
    }
}
