//! Tests of the arena as a whole. There is one arena per process, and some of these tests end in
//! SIGSEGV, so each runs in a child process: this test binary again, with one test selected.

use std::os::unix::process::ExitStatusExt;
use std::process::Output;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use super::*;
use crate::sys::clock::NEVER;
use crate::sys::rng::Rng;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;
const CHILD: &str = "TREFOIL_MEM_TEST_CHILD";

/// Runs `body` in a child process; the parent gets its output.
fn run_in_child(test: &str, body: impl FnOnce()) -> Option<Output> {
    if std::env::var(CHILD).is_ok_and(|name| name == test) {
        body();
        std::process::exit(0);
    }
    let path = module_path!().split_once("::").unwrap().1;
    let output = crate::sys::test_child::this_program()
        .args([&format!("{path}::{test}"), "--exact", "--nocapture", "--include-ignored"])
        .env(CHILD, test)
        .output()
        .unwrap();
    Some(output)
}

fn passes_in_child(test: &str, body: impl FnOnce()) {
    if let Some(out) = run_in_child(test, body) {
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let errors = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{:?}\n{text}\n{errors}", out.status);
        print!("{text}");
    }
}

fn faults_in_child(test: &str, body: impl FnOnce()) {
    if let Some(out) = run_in_child(test, body) {
        let errors = String::from_utf8_lossy(&out.stderr);
        let reached = String::from_utf8_lossy(&out.stdout).contains("about to fault");
        assert!(reached, "{errors}");
        assert_eq!(out.status.signal(), Some(libc::SIGSEGV), "{errors}");
    }
}

/// Starts a goroutine as a P does: takes a credit at spawn and a stack at the first run.
fn start(cache: &mut StackCache) -> Stack {
    cache.reserve_one().unwrap();
    take(cache)
}

/// Takes a stack for a credit that the caller has.
fn take(cache: &mut StackCache) -> Stack {
    loop {
        if let Some(stack) = cache.pop().or_else(|| cache.refill().unwrap()) {
            return stack;
        }
        refill_pool().unwrap();
    }
}

/// Ends a goroutine as a P does: recycles its stack and returns stack and credit to the cache.
fn end(cache: &mut StackCache, stack: Stack) {
    stack.recycle();
    cache.push(stack);
    cache.unreserve_one();
}

fn at(addr: usize) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(addr)
}

/// Writes to every page of a stack down to `depth` bytes.
fn touch(stack: &Stack, depth: usize) {
    let (low, high) = stack.bounds();
    for below in (64..depth).step_by(4 * KIB) {
        assert!(high - below >= low);
        // SAFETY: inside the bounds of a stack that the test owns.
        unsafe { at(high - below).write(7) };
    }
}

fn rss() -> usize {
    status("VmRSS:")
}

fn status(key: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|l| l.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * KIB
}

fn vmas() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

fn default_class_stats() -> arena::ClassStats {
    arena::class_stats(stack::class_of(256 * KIB).unwrap())
}

/// Returns the size of a slot for a requested size: the next power of two, and more if a page of
/// the kernel is larger than the ordinary guard.
fn slot_bytes(asked: usize) -> usize {
    let guard_beyond = arena::guard_bytes() - arena::GUARD_BYTES;
    (asked.max(64 * KIB) + guard_beyond).next_power_of_two().min(GIB)
}

fn assert_credits_are_covered() {
    let s = default_class_stats();
    assert!(s.slots >= s.reserved + LOCAL_MAX * s.caches, "{s:?}");
}

/// Returns a random number below `n`.
fn below(rng: &mut Rng, n: usize) -> usize {
    (rng.next() % n as u64) as usize
}

// ------------------------------------------------------------------------------------------- shape

#[test]
fn stack_has_the_size_bounds_and_guard_of_its_class() {
    passes_in_child("stack_has_the_size_bounds_and_guard_of_its_class", || {
        let mut cache = StackCache::new().unwrap();
        let stack = start(&mut cache);
        let (low, high) = stack.bounds();
        let size = slot_bytes(256 * KIB);
        assert_eq!(stack.size(), size);
        assert!(stack.is_default_size());
        assert_eq!(high, stack.sp() as usize);
        assert_eq!(high % 16, 0);
        assert!(high < stack.tp() as usize);
        assert!(high - low > size - arena::guard_bytes() - 12 * KIB);
        touch(&stack, high - low - 64);
        assert!(guard_hit(low).is_none() && guard_hit(high).is_none());
        let info = guard_hit(low - 1).unwrap();
        assert_eq!((info.low, info.size, info.index), (low, size, stack.index()));
        assert!(guard_hit(low - arena::guard_bytes()).is_some());
        assert!(guard_hit(0).is_none() && guard_hit(usize::MAX).is_none());

        let (mut blocks, mut ours) = (0, 0);
        for_each_block(&mut |tp| {
            blocks += 1;
            ours += usize::from(tp.as_ptr() == stack.tp());
        });
        assert_eq!((blocks, ours), (stats().live, 1));
        end(&mut cache, stack);
    });
}

#[test]
fn acquire_rounds_sizes_up_and_reuses_pooled_stacks() {
    passes_in_child("acquire_rounds_sizes_up_and_reuses_pooled_stacks", || {
        let sizes = [1, 32 * KIB, 33 * KIB, 100_000, 256 * KIB, MIB, 3 * MIB, 64 * MIB, 1 << 30];
        let stacks: Vec<Stack> = sizes.iter().map(|&n| acquire(n).unwrap()).collect();
        for (stack, size) in stacks.iter().zip(sizes) {
            assert_eq!(stack.size(), slot_bytes(size));
            assert_eq!(stack.is_default_size(), stack.size() == slot_bytes(256 * KIB));
            touch(stack, 8 * KIB);
        }
        let mut tids: Vec<u32> = stacks.iter().map(Stack::index).collect();
        tids.sort_unstable();
        tids.dedup();
        assert_eq!(tids.len(), sizes.len());
        assert_eq!(stats().reserved, sizes.len());
        let mapped = stats().mapped_bytes;
        stacks.into_iter().for_each(release);
        assert_eq!(stats().reserved, 0);
        for size in sizes {
            release(acquire(size).unwrap());
        }
        assert_eq!(stats().mapped_bytes, mapped, "pooled stacks are used again");
        assert!(acquire(0).is_err() && acquire((1 << 30) + 1).is_err());
    });
}

#[test]
fn slot_at_finds_every_stack_in_sorted_and_unsorted_chunks() {
    passes_in_child("slot_at_finds_every_stack_in_sorted_and_unsorted_chunks", || {
        let sizes = [MIB, 64 * KIB, 256 * KIB, 64 * MIB, 3 * MIB];
        // Several chunks of each.
        let each = |&n: &usize| (0..300.min(GIB / n)).map(move |_| acquire(n).unwrap());
        let stacks: Vec<Stack> = sizes.iter().flat_map(each).collect();
        assert!(stats().chunks > 2 * sizes.len());
        let all_found = || {
            for stack in &stacks {
                let (low, high) = stack.bounds();
                for addr in [low, low + 8, high - 8, stack.tp() as usize] {
                    let slot = slot_at(addr).expect("an address of a stack");
                    assert_eq!((slot.low, slot.index), (low, stack.index()));
                }
            }
            let here = 0_u8;
            for nowhere in [0, &raw const here as usize, usize::MAX] {
                assert!(slot_at(nowhere).is_none(), "{nowhere:#x}");
            }
        };
        all_found();
        // As if the kernel had not followed the hint for a chunk.
        arena::pretend_unsorted();
        all_found();
    });
}

#[test]
fn configure_sets_the_default_size_until_the_first_stack() {
    passes_in_child("configure_sets_the_default_size_until_the_first_stack", || {
        assert!(configure(2 << 30).is_err());
        configure(60 * KIB).unwrap();
        let mut cache = StackCache::new().unwrap();
        let stack = start(&mut cache);
        assert_eq!(stack.size(), slot_bytes(64 * KIB));
        configure(64 * KIB).unwrap();
        assert!(configure(128 * KIB).unwrap_err().to_string().contains("before the first"));
        end(&mut cache, stack);
    });
}

// ------------------------------------------------------------------------------------------ guards

/// Touches the lowest byte of a stack, then the guard `bytes` below it.
fn fault_below(low: usize, bytes: usize) {
    // SAFETY: the lowest byte of a stack that the test owns.
    unsafe { at(low).write(1) };
    assert!(guard_hit(low - bytes).is_some());
    println!("about to fault");
    // SAFETY: faults, which the test expects.
    unsafe { at(low - bytes).write_volatile(1) };
}

#[test]
fn touching_the_top_of_a_guard_faults() {
    faults_in_child("touching_the_top_of_a_guard_faults", || {
        fault_below(start(&mut StackCache::new().unwrap()).bounds().0, 1);
    });
}

#[test]
fn touching_the_bottom_of_a_guard_faults() {
    faults_in_child("touching_the_bottom_of_a_guard_faults", || {
        fault_below(acquire(MIB).unwrap().bounds().0, arena::guard_bytes());
    });
}

#[test]
fn touching_an_mprotect_guard_faults() {
    faults_in_child("touching_an_mprotect_guard_faults", || {
        force_mprotect_guards();
        fault_below(start(&mut StackCache::new().unwrap()).bounds().0, 1);
    });
}

#[test]
fn guard_survives_discard() {
    faults_in_child("guard_survives_discard", || {
        let stack = acquire(256 * KIB).unwrap();
        let (low, _) = stack.bounds();
        let base = low - arena::guard_bytes();
        // SAFETY: the test owns the slot and does not use the stack again.
        unsafe { mm::discard(&[mm::Span::new(base, base + 256 * KIB)]) }.unwrap();
        fault_below(low, 1);
    });
}

#[test]
fn guard_is_installed_again_after_its_chunk_was_released() {
    faults_in_child("guard_is_installed_again_after_its_chunk_was_released", || {
        let mut cache = StackCache::new().unwrap();
        for round in 0..2 {
            let stacks: Vec<Stack> = (0..4_000).map(|_| start(&mut cache)).collect();
            if round == 1 {
                // Every slot, so those of released chunks too.
                for stack in &stacks[1..] {
                    assert!(guard_hit(stack.bounds().0 - 1).is_some());
                }
                stacks.iter().for_each(|s| assert!(!readable(s.bounds().0 - 1)));
                fault_below(stacks[17].bounds().0, 1);
            }
            stacks.into_iter().for_each(|s| end(&mut cache, s));
        }
    });
}

/// Returns whether the kernel can read a byte at this address.
fn readable(addr: usize) -> bool {
    let mut fds = [0; 2];
    // SAFETY: plain calls; a bad address is EFAULT, not a fault.
    unsafe {
        assert_eq!(libc::pipe(fds.as_mut_ptr()), 0);
        let ok = libc::write(fds[1], at(addr).cast(), 1) == 1;
        libc::close(fds[0]);
        libc::close(fds[1]);
        ok
    }
}

/// Returns whether the mapping with this address is locked in memory.
fn is_locked(addr: usize) -> bool {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = text.lines();
    lines.find(|line| {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let number = |text| usize::from_str_radix(text, 16);
        range.is_some_and(|(low, high)| {
            matches!((number(low), number(high)), (Ok(l), Ok(h)) if (l..h).contains(&addr))
        })
    });
    let flags = lines.find(|line| line.starts_with("VmFlags:")).expect("a mapping has flags");
    flags.split(' ').any(|flag| flag == "lo")
}

#[test]
fn guards_in_a_locked_chunk_do_not_lock_another_chunk() {
    passes_in_child("guards_in_a_locked_chunk_do_not_lock_another_chunk", || {
        if mm::guard_kind() != mm::GuardKind::Marker {
            return println!("skipped: this kernel has no guard markers");
        }
        let class = StackConfig::get().unwrap().default();
        arena::reserve(class, 1).unwrap();
        // SAFETY: no memory is passed.
        if unsafe { libc::mlockall(libc::MCL_CURRENT) } != 0 {
            return println!("skipped: mlockall is refused here");
        }
        arena::reserve(class, default_class_stats().slots).unwrap();
        // One slot of each chunk: the first, which is locked, and the second, which came later.
        let all = arena::take_unused::<2048>(class, 2048);
        let mut slots = SlotList::<2>::new();
        let of = |id| all.iter().find(|slot| slot.chunk_id() == id).unwrap();
        slots.push(of(0));
        slots.push(of(1));
        assert!(slots.iter().all(|slot| !slot.is_guarded()));
        assert_eq!((is_locked(of(0).low()), is_locked(of(1).low())), (true, false));
        assert_eq!(make(&slots).unwrap().len(), 2);
        assert!(slots.iter().all(|slot| slot.is_guarded() && !readable(slot.base())));
        assert_eq!((is_locked(of(0).low()), is_locked(of(1).low())), (true, false));
    });
}

// ------------------------------------------------------------------------------------------ limits

#[test]
fn map_limit_is_a_clear_error_at_reservation() {
    passes_in_child("map_limit_is_a_clear_error_at_reservation", || {
        force_mprotect_guards();
        let mut cache = StackCache::new().unwrap();
        let mut reserved = 0;
        let error = loop {
            match cache.reserve_one() {
                Ok(()) => reserved += 1,
                Err(e) => break io::Error::from(e).to_string(),
            }
            if reserved == 1 << 20 {
                return println!("vm.max_map_count is too large here to reach");
            }
        };
        assert!(error.contains("vm.max_map_count") && error.contains("MADV_GUARD"), "{error}");
        println!("after {reserved}: {error}");
        let before = (vmas(), stats().slots);
        (0..20).for_each(|_| assert!(cache.reserve_one().is_err()));
        // Reading /proc/self/maps takes a mapping or two itself; half a chunk would be hundreds.
        assert!(vmas() <= before.0 + 4, "something half-done remains");
        assert_eq!(stats().slots, before.1);
        // What was reserved is available.
        let some: Vec<Stack> = (0..1000).map(|_| take(&mut cache)).collect();
        some.into_iter().for_each(|s| end(&mut cache, s));
        cache.reserve_one().unwrap();
    });
}

#[test]
fn address_space_limit_is_a_clear_error_at_reservation() {
    if crate::sys::test_child::is_emulated() {
        return eprintln!("skipped: qemu-user does not apply RLIMIT_AS");
    }
    passes_in_child("address_space_limit_is_a_clear_error_at_reservation", || {
        let mut cache = StackCache::new().unwrap();
        let limit = libc::rlimit { rlim_cur: 2 << 30, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: limits this child only.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
        let mut reserved = 0;
        let error = loop {
            match cache.reserve_one() {
                Ok(()) => reserved += 1,
                Err(e) => break io::Error::from(e).to_string(),
            }
        };
        assert!(error.contains("ulimit -v"), "{error}");
        let stacks: Vec<Stack> = (0..reserved).map(|_| take(&mut cache)).collect();
        println!("all {} reserved stacks were made; then: {error}", stacks.len());
    });
}

// ----------------------------------------------------------------------------------------- credits

#[test]
fn credits_are_covered_under_random_operations() {
    passes_in_child("credits_are_covered_under_random_operations", || {
        let mut rng = Rng::from_seed(1);
        let mut caches: Vec<StackCache> = (0..3).map(|_| StackCache::new().unwrap()).collect();
        let (mut waiting, mut running, mut apart) = (0usize, Vec::new(), Vec::new());
        let mut peak = 0;
        for round in 0..60_000 {
            let c = below(&mut rng, caches.len());
            let cache = &mut caches[c];
            // The load oscillates, so that the pool overflows, and chunks become unused and are
            // used again.
            let growing = round / 5_000 % 2 == 0;
            match below(&mut rng, 100) {
                0..30 if growing || waiting < 20 => {
                    for _ in 0..below(&mut rng, 8) {
                        cache.reserve_one().unwrap();
                        waiting += 1;
                    }
                }
                30..60 if waiting > 0 => {
                    for _ in 0..below(&mut rng, waiting.min(200)) {
                        let s = take(cache);
                        running.push(s);
                        waiting -= 1;
                    }
                }
                60..90 => {
                    let some = if growing { 4 } else { 40 };
                    for _ in 0..below(&mut rng, running.len().clamp(1, some)) {
                        let s = running.swap_remove(below(&mut rng, running.len()));
                        end(cache, s);
                    }
                }
                90 => apart.push(acquire(256 * KIB).unwrap()),
                91 if !apart.is_empty() => end(cache, apart.pop().unwrap()),
                92 if !apart.is_empty() => release(apart.pop().unwrap()),
                93 => cache.drain(),
                94 => {
                    reserve_one().unwrap();
                    waiting += 1;
                }
                95 if waiting > 0 => {
                    unreserve_one();
                    waiting -= 1;
                }
                _ => {}
            }
            assert_credits_are_covered();
            assert!(default_class_stats().reserved >= waiting + running.len() + apart.len());
            assert!(caches.iter().all(|c| c.stacks.len() < LOCAL_MAX));
            peak = peak.max(running.len());
        }
        assert!(peak > 2 * POOL_MAX, "{peak}");
        running.into_iter().for_each(|s| end(&mut caches[0], s));
        apart.into_iter().for_each(release);
        (0..waiting).for_each(|_| unreserve_one());
        caches.iter_mut().for_each(StackCache::drain);
        let s = stats();
        assert_eq!((s.reserved, s.caches), (0, 0));
        assert_eq!(s.live, s.pooled);
        assert_eq!(s.live + s.unused, s.slots);
        println!("{s:?}");
    });
}

#[test]
fn no_stack_has_two_owners() {
    passes_in_child("no_stack_has_two_owners", || {
        let taken: Vec<AtomicBool> = (0..1 << 16).map(|_| AtomicBool::new(false)).collect();
        let exchange = Mutex::new(Vec::<Stack>::new());
        let walks = AtomicUsize::new(0);
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            let workers: Vec<_> = (0..4u64)
                .map(|t| {
                    let (taken, exchange) = (&taken, &exchange);
                    s.spawn(move || {
                        let mut rng = Rng::from_seed(t + 1);
                        let mut cache = StackCache::new().unwrap();
                        let mut held = Vec::new();
                        for round in 0..20_000 {
                            let growing = round / 250 % 2 == 0;
                            for _ in 0..below(&mut rng, if growing { 60 } else { 20 }) {
                                let stack = start(&mut cache);
                                let was =
                                    taken[stack.index() as usize].swap(true, Ordering::Relaxed);
                                assert!(!was, "stack {} has two owners", stack.index());
                                held.push(stack);
                            }
                            if below(&mut rng, 4) == 0 {
                                std::mem::swap(&mut *exchange.lock().unwrap(), &mut held);
                            }
                            for _ in
                                0..below(&mut rng, if growing { 40 } else { 90 }).min(held.len())
                            {
                                let stack = held.swap_remove(below(&mut rng, held.len()));
                                taken[stack.index() as usize].store(false, Ordering::Relaxed);
                                end(&mut cache, stack);
                            }
                            if round % 1000 == 999 {
                                cache.drain();
                            }
                        }
                        for stack in held {
                            taken[stack.index() as usize].store(false, Ordering::Relaxed);
                            end(&mut cache, stack);
                        }
                        cache.drain();
                    })
                })
                .collect();
            s.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    // SAFETY: for_each_block keeps the block from going away.
                    for_each_block(&mut |tp| unsafe {
                        assert!(tls::tid_of(tp.as_ptr().addr()) >= 0x2000_0000);
                    });
                    assert_credits_are_covered();
                    walks.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
            });
            workers.into_iter().for_each(|w| w.join().unwrap());
            stop.store(true, Ordering::Relaxed);
        });
        exchange.into_inner().unwrap().into_iter().for_each(|s| {
            release(s);
            unreserve_one();
        });
        let s = stats();
        assert_eq!((s.reserved, s.caches, s.live), (0, 0, s.pooled));
        println!("{s:?}, {} walks", walks.into_inner());
    });
}

// ------------------------------------------------------------------------------------------ memory

#[test]
fn scavenger_returns_memory_after_a_burst() {
    if crate::sys::test_child::is_emulated() {
        return eprintln!("skipped: the emulator's own memory is counted");
    }
    passes_in_child("scavenger_returns_memory_after_a_burst", || {
        let mut cache = StackCache::new().unwrap();
        let before = (rss(), status("VmPTE:"));
        let stacks: Vec<Stack> = (0..6_000).map(|_| start(&mut cache)).collect();
        stacks.iter().for_each(|s| touch(s, 64 * KIB));
        let peak = (rss(), status("VmPTE:"));
        assert!(peak.0 - before.0 > 6_000 * 64 * KIB);
        stacks.into_iter().for_each(|s| end(&mut cache, s));
        let full = rss();
        // At first nothing is retired. After a period without need, stacks are retired step by
        // step.
        let (mut scavenger, mut time) = (Scavenger::new(), 1);
        time = scavenger.run_due(|| time);
        assert!(rss() + 4 * MIB > full);
        while time != NEVER {
            time = scavenger.run_due(|| time);
        }
        let after = (rss(), status("VmPTE:"));
        println!(
            "RSS and page tables, KiB: {:?} {:?} {:?}",
            in_kib(before),
            in_kib(peak),
            in_kib(after)
        );
        // What a stack keeps may begin inside a page.
        let kept_each = if mm::page() == mm::PAGE { 16 * KIB } else { 2 * mm::page() };
        let kept = POOL_MAX * kept_each + LOCAL_MAX * (64 * KIB + kept_each);
        assert!(after.0 < before.0 + kept + 4 * MIB);
    });
}

fn in_kib((a, b): (usize, usize)) -> (usize, usize) {
    (a / KIB, b / KIB)
}

#[test]
fn hundred_thousand_stacks_take_few_mappings() {
    if crate::sys::test_child::is_emulated() {
        return eprintln!("skipped: qemu-user has no guard markers");
    }
    passes_in_child("hundred_thousand_stacks_take_few_mappings", || {
        // A stack takes a page: as much memory with larger pages.
        many(100_000 / (mm::page() / mm::PAGE));
    });
}

#[test]
#[ignore = "8 GiB"]
fn a_million_stacks_take_few_mappings() {
    passes_in_child("a_million_stacks_take_few_mappings", || many(1_000_000));
}

/// Makes `n` stacks, ends them all and counts mappings and memory.
fn many(n: usize) {
    let mut cache = StackCache::new().unwrap();
    let mut stacks = Vec::with_capacity(n);
    let before = (vmas(), rss());
    for _ in 0..n {
        stacks.push(start(&mut cache));
    }
    let (peak, tables) = (rss() - before.1, status("VmPTE:"));
    let maps = vmas();
    if mm::guard_kind() == mm::GuardKind::Marker {
        assert!(maps <= before.0 + 4, "{} mappings before, {maps} after", before.0);
    }
    let t = Instant::now();
    stacks.into_iter().for_each(|s| end(&mut cache, s));
    let each = t.elapsed().as_nanos() as usize / n;
    Scavenger::new().finish();
    let s = stats();
    println!(
        "{n} stacks: {} mappings, {} B resident and {} B page table each; ended in {each} ns each, \
         then {} KiB resident, {} KiB page tables\n{s:?}",
        maps - before.0,
        peak / n,
        tables / n,
        rss() / KIB,
        status("VmPTE:") / KIB,
    );
    assert!(s.live <= POOL_MAX + LOCAL_MAX);
}

// ----------------------------------------------------------------------------------------- timings

fn timed(what: &str, n: usize, mut f: impl FnMut()) {
    let best = (0..5).map(|_| {
        let t = Instant::now();
        f();
        t.elapsed().as_nanos() as f64 / n as f64
    });
    println!("{what:58} {:9.2} ns", best.fold(f64::MAX, f64::min));
}

#[test]
#[ignore = "prints timings: cargo test --release -- --ignored --nocapture print_timings"]
fn print_timings() {
    passes_in_child("print_timings", || {
        let mut cache = StackCache::new().unwrap();
        let mut other = StackCache::new().unwrap();
        let mut held: Vec<Stack> = (0..16).map(|_| start(&mut cache)).collect();
        held.drain(..).for_each(|s| end(&mut cache, s));
        timed("pop + push", 1_000_000, || {
            for _ in 0..1_000_000 {
                let s = std::hint::black_box(cache.pop().unwrap());
                cache.push(s);
            }
        });
        timed("reserve_one + unreserve_one", 1_000_000, || {
            for _ in 0..1_000_000 {
                cache.reserve_one().unwrap();
                std::hint::black_box(&mut cache).unreserve_one();
            }
        });
        timed("from one cache to another through the pool, each", 64_000, || {
            for _ in 0..1000 {
                for _ in 0..64 {
                    held.push(start(&mut cache));
                }
                held.drain(..).for_each(|s| {
                    other.push(s);
                    cache.unreserve_one();
                });
                for _ in 0..64 {
                    held.push(start(&mut other));
                }
                held.drain(..).for_each(|s| {
                    cache.push(s);
                    other.unreserve_one();
                });
            }
        });
        timed("acquire + release of 1 MiB", 10_000, || {
            for _ in 0..10_000 {
                release(acquire(MIB).unwrap());
            }
        });
        for touched in [0, 8 * KIB, 64 * KIB] {
            let (mut made, mut ended) = (0, 0);
            const N: usize = 20_000;
            for _ in 0..3 {
                let t = Instant::now();
                for _ in 0..N {
                    held.push(start(&mut cache));
                }
                made = t.elapsed().as_nanos() as usize / N;
                held.iter().for_each(|s| touch(s, touched));
                let t = Instant::now();
                held.drain(..).for_each(|s| end(&mut cache, s));
                ended = t.elapsed().as_nanos() as usize / N;
            }
            println!(
                "burst of {N}, {touched:6} B touched: made in {made} ns each, ended in {ended}"
            );
        }
    });
}

// ------------------------------------------------------------------------------------------- pool

/// Not in stack_pool.rs, which the model crate compiles with a lock that works only inside a model.
mod stack_pool_alone {
    use std::cell::Cell;
    use std::ptr::NonNull;

    use crate::mem::stack_pool::{BatchLinks, BatchNode, PoolState, StackBatch, StackPool};
    use crate::sys::lock::Lock;

    struct TestNode {
        next: Cell<Option<NonNull<TestNode>>>,
        batch: Cell<Option<BatchLinks<TestNode>>>,
        id: usize,
    }

    // SAFETY: plain cells: a getter returns what the setter stored.
    unsafe impl BatchNode for TestNode {
        unsafe fn next(this: NonNull<Self>) -> Option<NonNull<Self>> {
            // SAFETY: nodes of a test outlive it.
            unsafe { this.as_ref() }.next.get()
        }
        unsafe fn set_next(this: NonNull<Self>, next: Option<NonNull<Self>>) {
            // SAFETY: as above.
            unsafe { this.as_ref() }.next.set(next);
        }
        unsafe fn batch(this: NonNull<Self>) -> BatchLinks<Self> {
            // SAFETY: as above.
            unsafe { this.as_ref() }.batch.get().expect("set before")
        }
        unsafe fn set_batch(this: NonNull<Self>, links: BatchLinks<Self>) {
            // SAFETY: as above.
            unsafe { this.as_ref() }.batch.set(Some(links));
        }
    }

    fn batch_of(ids: std::ops::Range<usize>) -> StackBatch<TestNode> {
        let mut batch = StackBatch::new();
        for id in ids.rev() {
            let node = Box::new(TestNode { next: Cell::new(None), batch: Cell::new(None), id });
            // SAFETY: leaked here, owned by the batch.
            unsafe { batch.push(NonNull::from(Box::leak(node))) };
        }
        batch
    }

    fn ids(batch: &StackBatch<TestNode>) -> Vec<usize> {
        let mut out = Vec::new();
        // SAFETY: nodes are never freed.
        batch.for_each(|b| out.push(unsafe { b.as_ref() }.id));
        out
    }

    #[test]
    fn split_off_keeps_the_newest_and_append_restores() {
        let mut b = batch_of(0..10);
        let rest = b.split_off(4);
        assert_eq!((ids(&b), ids(&rest)), (vec![0, 1, 2, 3], vec![4, 5, 6, 7, 8, 9]));
        assert_eq!((b.len(), rest.len()), (4, 6));
        b.append(rest);
        assert_eq!(ids(&b), (0..10).collect::<Vec<_>>());
        assert!(b.split_off(10).is_empty());
    }

    #[test]
    fn pool_is_bounded_by_max_and_returns_whole_batches() {
        let pool = StackPool::new(Lock::new(PoolState::new()));
        assert!(pool.put(batch_of(0..4), 10).is_none());
        assert!(pool.put(batch_of(4..8), 10).is_none());
        let back = pool.put(batch_of(8..11), 10).expect("would not fit");
        assert_eq!(ids(&back), [8, 9, 10]);
        assert_eq!(pool.len(), 8);
        let one = pool.take_one_or_else(|| ()).expect("not empty");
        // SAFETY: nodes are never freed.
        assert_eq!(unsafe { one.as_ref() }.id, 4);
        // The rest of the broken batch (3) and the one below (4) fit in 7, not in 6.
        assert_eq!(ids(&pool.take_or_else(6, || ()).unwrap()), [5, 6, 7]);
        assert_eq!(ids(&pool.take_or_else(1, || ()).unwrap()), [0, 1, 2, 3]);
        assert_eq!(pool.take_or_else(1, || 42).err(), Some(42));
        assert_eq!(pool.len(), 0);
    }
}
