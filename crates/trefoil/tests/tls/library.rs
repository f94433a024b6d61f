//! The rest of std: threads, processes, park, malloc, collections.

use crate::common::crowd::{crowd, joined, yields};
use crate::common::is_emulated;
use crate::on_goroutines;
use crate::values::CELL;
use rand::Rng;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self};
use std::time::Duration;
use trefoil::{go, yield_now};

#[test]
fn goroutines_start_threads_and_processes_and_keep_their_values() {
    on_goroutines(|| {
        let busy = Arc::new(AtomicBool::new(true));
        let others: Vec<_> = (0..8)
            .map(|i| {
                let busy = busy.clone();
                go(move || {
                    CELL.set(i + 1);
                    while busy.load(SeqCst) {
                        yield_now();
                        assert_eq!(CELL.get(), i + 1);
                    }
                })
            })
            .collect();
        let handles = crowd(60, |i| {
            CELL.set(i + 100);
            let me = thread::current().id();
            for _ in 0..3 {
                yield_now();
                let thread = thread::spawn(move || {
                    assert_eq!(CELL.replace(7), 0, "a plain thread sees a goroutine's value");
                    assert_eq!(trefoil::id(), 0);
                    // A goroutine of the default runtime, started and joined by a plain thread.
                    let inner = joined(go(|| CELL.replace(9)));
                    (thread::current().id(), CELL.get(), inner)
                });
                let (id, seven, inner) = thread.join().unwrap();
                assert_ne!(id, me);
                assert_eq!((seven, inner), (7, 0));
                assert_eq!(CELL.get(), i + 100);
            }
            if i % 6 == 0 {
                let out = Command::new("echo").arg(i.to_string()).output().unwrap();
                assert!(out.status.success());
                assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), i.to_string());
                let status = Command::new("false").status().unwrap();
                assert_eq!(status.code(), Some(1));
                // qemu-user makes `vfork` a `fork`, so the child cannot report that error.
                if !is_emulated() {
                    let missing = Command::new("/no/such/program").status().unwrap_err();
                    assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
                }
            }
            thread::scope(|s| {
                let x = s.spawn(|| i + 1);
                assert_eq!(x.join().unwrap(), i + 1);
            });
            assert_eq!(thread::current().id(), me);
        });
        handles.into_iter().for_each(joined);
        busy.store(false, SeqCst);
        others.into_iter().for_each(joined);
    });
}

#[test]
fn an_unpark_token_belongs_to_the_goroutine() {
    on_goroutines(|| {
        let handles = crowd(500, |_| {
            for _ in 0..5 {
                let me = thread::current();
                me.unpark();
                yields(2);
                // Hangs if the token belongs to the thread.
                thread::park();
            }
            // An unused token ends with its goroutine.
            thread::current().unpark();
        });
        handles.into_iter().for_each(joined);
        let timeout = Duration::from_millis(1);
        let start = std::time::Instant::now();
        joined(go(move || thread::park_timeout(timeout)));
        assert!(start.elapsed() >= timeout, "a new goroutine found a token");
    });
}

#[test]
#[ignore = "takes long"]
fn memory_is_freed_on_other_threads_and_goroutines() {
    on_goroutines(|| {
        let handles = crowd(1000, |i| {
            let mut rng = rand::rng();
            let mut kept: Vec<(u8, Vec<u8>)> = Vec::new();
            for step in 0..60 {
                let size = match rng.random_range(0..20) {
                    0 => rng.random_range(0..200_000),
                    1..5 => rng.random_range(0..8_000),
                    _ => rng.random_range(0..400),
                };
                let byte = (i + step) as u8;
                kept.push((byte, vec![byte; size]));
                if kept.len() > 12 {
                    let (byte, bytes) = kept.swap_remove(rng.random_range(0..kept.len()));
                    assert!(bytes.iter().all(|&b| b == byte), "the memory was overwritten");
                }
                if step % 4 == 0 {
                    yield_now();
                }
            }
            kept
        });
        for handle in handles {
            // Freed by another goroutine than the one that allocated it.
            for (byte, bytes) in joined(handle) {
                assert!(bytes.iter().all(|&b| b == byte), "the memory was overwritten");
            }
        }
    });
}

#[test]
fn strings_maps_and_reference_counts_survive_yields() {
    on_goroutines(|| {
        let handles = crowd(1000, |i| {
            let words = Rc::new(RefCell::new(HashMap::new()));
            let same = words.clone();
            let mut sorted = BTreeMap::new();
            for k in 0..40 {
                let word = format!("{:>4}-{}", (k * 7919 + i) % 100, k % 9);
                *same.borrow_mut().entry(word.clone()).or_insert(0) += k;
                *sorted.entry(word).or_insert(0) += k;
                if k % 10 == 0 {
                    let held = words.borrow();
                    yield_now();
                    drop(held);
                }
            }
            let mut list: Vec<_> = words.borrow().iter().map(|(w, n)| (w.clone(), *n)).collect();
            list.sort();
            assert_eq!(Rc::strong_count(&words), 2);
            assert_eq!(list, sorted.into_iter().collect::<Vec<_>>());
            let numbers: String = list.iter().map(|(w, n)| format!("{w}={n};")).collect();
            yield_now();
            let sum: usize = numbers
                .split(';')
                .filter_map(|part| part.split_once('='))
                .map(|(_, n)| n.parse::<usize>().unwrap())
                .sum();
            assert_eq!(sum, 780);
            assert_eq!(format!("{:?}", "é\n".repeat(3)).to_uppercase().len(), 14);
        });
        handles.into_iter().for_each(joined);
    });
}
