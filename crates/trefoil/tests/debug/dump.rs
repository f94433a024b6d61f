//! Dumps: what they show of goroutines that wait, run, start and end. (Deadlocks: `deadlock.rs`.)

use crate::common::{self, child_test, watchdog, yield_until};
use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::io::Read;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};
use trefoil::chan::{Select, bounded, never};
use trefoil::net::{TcpListener, UnixStream};
use trefoil::sync::{Barrier, Condvar, Mutex, Once, RwLock, Semaphore, WaitGroup};
use trefoil::time::{Ticker, Timer, sleep};
use trefoil::{Builder, Runtime, debug, go, run, scope, select};

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Discards a result.
fn ignore<T>(_: T) {}

#[inline(never)]
fn waits_in_here(rx: &trefoil::chan::Receiver<()>) {
    let _ = rx.recv();
}

#[test]
fn a_dump_shows_states_stacks_and_origins() {
    let _watchdog = watchdog();
    run(|| {
        let (tx, rx) = bounded::<()>(0);
        let receiver = Builder::new().name("receiver").go(move || waits_in_here(&rx)).unwrap();
        // For ever, because the first dump reads the debug information, which may take seconds.
        let sleeper = go(|| sleep(Duration::MAX));
        let joiner = go(move || sleeper.join().unwrap());
        // Only a dump shows that they already wait.
        yield_until("the goroutines to wait", || {
            let text = debug::dump();
            ["[chan receive]:", "[sleep]:", "[join]:"].iter().all(|state| text.contains(state))
        });
        let text = debug::dump();
        assert!(text.starts_with("goroutine 1 \"main\" [running]:"), "{text}");
        let block = |head: &str| {
            let at = text.find(head).unwrap_or_else(|| panic!("no {head} in:\n{text}"));
            text[at..].split("\n\n").next().unwrap().to_owned()
        };
        let shown = block(&format!("goroutine {} \"receiver\" [chan receive]:", receiver.id()));
        assert!(shown.contains("waits_in_here"), "{shown}");
        assert!(shown.contains("in goroutine 1"), "{shown}");
        assert!(shown.contains("dump.rs:"), "{shown}");
        assert!(text.contains("[sleep]:") && text.contains("[join]:"), "{text}");
        let mentions =
            text.matches("in goroutine").count() + text.matches("joins goroutine").count();
        assert_eq!(text.matches("goroutine ").count() - mentions, 4);
        drop(tx);
        receiver.join().unwrap();
        assert!(!joiner.is_finished());
    });
}

unsafe extern "C" fn waits_in_comparison(rx: *const c_void, _: *const c_void) -> c_int {
    // SAFETY: the key of `searches_in_here`.
    waits_in_here(unsafe { &*rx.cast() });
    black_box(0)
}

/// Waits in a function that libc calls.
#[inline(never)]
fn searches_in_here(rx: &trefoil::chan::Receiver<()>) {
    let key = ptr::from_ref(rx).cast::<c_void>();
    let bytes = size_of_val(rx);
    // SAFETY: an array of one element, which is the key as well.
    unsafe { libc::bsearch(key, key, 1, bytes, Some(waits_in_comparison)) };
    black_box(());
}

#[test]
fn a_second_dump_shows_the_frames_of_the_first() {
    let _watchdog = watchdog();
    run(|| {
        let (tx, rx) = bounded::<()>(0);
        let searcher = go(move || searches_in_here(&rx));
        let dump = || {
            let text = debug::dump();
            let part = text.split("\n\n").find(|part| part.contains("[chan receive]:"));
            part.unwrap_or_default().to_owned()
        };
        // The first dump maps the files to read their symbols.
        yield_until("the goroutine to wait", || !dump().is_empty());
        let first = dump();
        let mut rest = &first[..];
        for name in ["waits_in_here", "waits_in_comparison", "bsearch", "searches_in_here"] {
            let found = rest.split_once(name);
            rest = found.unwrap_or_else(|| panic!("no {name} in:\n{first}")).1;
        }
        for _ in 0..3 {
            assert_eq!(dump(), first);
        }
        drop(tx);
        searcher.join().unwrap();
    });
}

#[test]
fn dumps_are_complete_while_goroutines_start_and_end() {
    let _watchdog = watchdog();
    Runtime::builder().procs(4).build().unwrap().run(|| {
        let (tx, rx) = bounded::<usize>(1);
        for i in 0..20 {
            let (tx, rx) = (tx.clone(), rx.clone());
            go(move || {
                for k in 0.. {
                    let named = Builder::new().name(format!("child {k}")).go(|| ()).unwrap();
                    if tx.send(i).is_err() || rx.recv().is_err() {
                        break;
                    }
                    named.join().unwrap();
                }
            });
        }
        for _ in 0..common::rounds(30, 100) {
            assert!(debug::dump().contains("goroutine 1 \"main\" [running]:"));
            sleep(Duration::from_micros(200));
        }
        tx.close();
    });
}

/// Every wait has its reason; where Go has the same wait, the words are Go's.
#[test]
fn a_dump_shows_the_reason_of_every_wait() {
    let _watchdog = watchdog();
    Runtime::builder().procs(2).build().unwrap().run(|| {
        type Wait = Box<dyn FnOnce() + Send>;
        let mut waits: Vec<(&str, Wait)> = Vec::new();
        let (tx, rx) = bounded::<u8>(0);
        let (full, _full_rx) = bounded::<u8>(1);
        full.send(0).unwrap();
        let hour = Duration::from_secs(3600);

        let (r, t) = (rx.clone(), full.clone());
        waits.push(("chan receive", Box::new(move || ignore(r.recv()))));
        waits.push(("chan send", Box::new(move || ignore(t.send(1)))));
        let (r, t) = (rx.clone(), full.clone());
        waits.push(("chan receive", Box::new(move || ignore(r.recv_timeout(hour)))));
        waits.push(("chan send", Box::new(move || ignore(t.send_timeout(1, hour)))));
        waits.push(("chan receive (nil chan)", Box::new(|| ignore(never::<u8>().recv()))));
        let r = rx.clone();
        // A select of one operation shows that operation.
        waits.push(("chan receive", Box::new(move || select! { recv(r) -> _ => {} })));
        let (r, t) = (rx.clone(), full.clone());
        waits.push((
            "select",
            Box::new(move || {
                select! {
                    recv(r) -> _ => {}
                    send(t, 1) -> _ => {}
                }
            }),
        ));
        let r = rx.clone();
        waits.push((
            "select",
            Box::new(move || {
                let mut select = Select::new();
                select.recv(&r);
                ignore(select.select());
            }),
        ));
        waits.push(("select (no cases)", Box::new(|| select! {})));
        waits.push(("select", Box::new(move || select! { after(hour) => {} })));

        waits.push(("sleep", Box::new(move || sleep(hour))));
        waits.push(("chan receive", Box::new(move || ignore(Timer::new(hour).chan().recv()))));
        waits.push(("chan receive", Box::new(move || ignore(Ticker::new(hour).chan().recv()))));
        waits.push((
            "join",
            Box::new(move || go(move || sleep(Duration::from_secs(3600))).join().unwrap()),
        ));
        waits.push(("scope", Box::new(move || scope(|s| drop(s.go(move || sleep(hour)))))));

        let mutex = Arc::new(Mutex::new(()));
        let held = mutex.lock();
        let m = mutex.clone();
        waits.push(("sync.Mutex.Lock", Box::new(move || drop(m.lock()))));
        let m = mutex.clone();
        waits.push(("sync.Mutex.Lock", Box::new(move || drop(m.try_lock_for(hour)))));
        let write_held = Arc::new(RwLock::new(()));
        let writing = write_held.write();
        let l = write_held.clone();
        waits.push(("sync.RWMutex.RLock", Box::new(move || drop(l.read()))));
        let l = write_held.clone();
        waits.push(("sync.RWMutex.Lock", Box::new(move || drop(l.write()))));
        let read_held = Arc::new(RwLock::new(()));
        let reading = read_held.read();
        let l = read_held.clone();
        waits.push(("sync.RWMutex.Lock", Box::new(move || drop(l.write()))));
        waits.push((
            "sync.Cond.Wait",
            Box::new(|| {
                let mutex = Mutex::new(());
                Condvar::new().wait(&mut mutex.lock());
            }),
        ));
        let group = WaitGroup::new();
        group.add(1);
        let group = Arc::new(group);
        let g = group.clone();
        waits.push(("sync.WaitGroup.Wait", Box::new(move || g.wait())));
        let once = Arc::new((Once::new(), AtomicBool::new(false)));
        let o = once.clone();
        // The first goroutine runs the closure and sleeps in it.
        let first = move || {
            o.0.call_once(|| {
                o.1.store(true, Ordering::SeqCst);
                sleep(hour);
            });
        };
        waits.push(("sleep", Box::new(first)));
        let second = move || {
            common::yield_until("the first goroutine", || once.1.load(Ordering::SeqCst));
            once.0.call_once(|| unreachable!());
        };
        waits.push(("sync.Once.Do", Box::new(second)));
        waits.push(("sync.Barrier.Wait", Box::new(|| ignore(Barrier::new(2).wait()))));
        waits.push(("semacquire", Box::new(|| drop(Semaphore::new(0).acquire()))));
        waits.push(("semacquire", Box::new(move || drop(Semaphore::new(0).acquire_timeout(hour)))));

        let (mut socket, _open) = UnixStream::pair().unwrap();
        waits.push(("IO wait", Box::new(move || ignore(socket.read(&mut [0])))));
        let (mut socket, _open) = std::os::unix::net::UnixStream::pair().unwrap();
        waits.push(("IO wait", Box::new(move || ignore(socket.read(&mut [0])))));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        waits.push(("IO wait", Box::new(move || ignore(listener.accept()))));

        let mut expected = Vec::new();
        for (i, (reason, wait)) in waits.into_iter().enumerate() {
            Builder::new().name(format!("waiter {i}")).go(wait).unwrap();
            expected.push(format!("\"waiter {i}\" [{reason}]:"));
        }
        let start = Instant::now();
        loop {
            sleep(ms(1));
            let text = debug::dump();
            let missing: Vec<_> = expected.iter().filter(|line| !text.contains(&**line)).collect();
            if missing.is_empty() {
                break;
            }
            assert!(start.elapsed() < common::TOO_LONG / 2, "no {missing:?} in:\n{text}");
        }
        drop((held, writing, reading, tx));
    });
}

/// The number of seconds by which this process's clock is moved forward.
static AHEAD: AtomicI64 = AtomicI64::new(0);

/// The clock of `Instant`. The linker finds this function before libc's.
#[unsafe(no_mangle)]
extern "C" fn clock_gettime(id: libc::clockid_t, time: &mut libc::timespec) -> libc::c_int {
    // libc's function would be this one.
    let args = [id as usize, std::ptr::from_mut(time).addr(), 0, 0];
    let result = common::raw::raw(libc::SYS_clock_gettime, args);
    if id == libc::CLOCK_MONOTONIC {
        time.tv_sec += AHEAD.load(Ordering::Relaxed);
    }
    result as libc::c_int
}

#[test]
fn a_dump_shows_the_minutes_of_a_long_wait() {
    // In the child, because every clock of the process is moved forward.
    child_test!();
    run(|| {
        let (_tx, rx) = bounded::<()>(0);
        Builder::new().name("waiter").go(move || ignore(rx.recv())).unwrap();
        yield_until("the goroutine", || debug::dump().contains("\"waiter\" [chan receive]:"));
        AHEAD.store(3 * 60 + 10, Ordering::Relaxed);
        let text = debug::dump();
        assert!(text.contains("\"waiter\" [chan receive, 3 minutes]:"), "{text}");
    });
}
