//! What the macro `select!` accepts, evaluates and drops.

use crate::at_all_procs;
use crate::common::{watchdog, yield_until};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use trefoil::chan::{Receiver, RecvError, Sender, bounded, never, unbounded};
use trefoil::{go, select};

#[test]
fn operands_are_evaluated_once_and_in_order() {
    let _dog = watchdog();
    at_all_procs(|| {
        let log = std::cell::RefCell::new(Vec::new());
        let note = |what: &'static str| log.borrow_mut().push(what);
        let (t1, c1) = bounded::<i32>(0);
        let (t2, _c2) = bounded::<&str>(1);
        let chosen = select! {
            recv({ note("c1"); &c1 }) -> _ => "c1",
            send({ note("t2"); &t2 }, { note("v2"); "v" }) -> r => {
                note("body");
                r.unwrap();
                "t2"
            }
            send({ note("t1"); t1.clone() }, { note("v1"); 1 }) -> _ => "t1",
            after({ note("after"); Duration::from_secs(50) }) => "after",
        };
        assert_eq!(chosen, "t2");
        assert_eq!(*log.borrow(), ["c1", "t2", "v2", "t1", "v1", "after", "body"]);
    });
}

#[test]
fn values_of_other_arms_are_dropped_before_the_body() {
    struct Noisy<'a>(&'a AtomicUsize);
    impl Drop for Noisy<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let _dog = watchdog();
    let dropped = AtomicUsize::new(0);
    let (full, _rx) = bounded(0);
    let (closed, gone) = bounded(1);
    drop(gone);
    select! {
        send(full, Noisy(&dropped)) -> _ => unreachable!(),
        send(full, Noisy(&dropped)) -> _ => unreachable!(),
        send(closed, Noisy(&dropped)) -> r => {
            assert_eq!(dropped.load(Ordering::SeqCst), 2);
            assert!(r.is_err());
        }
    }
    assert_eq!(dropped.load(Ordering::SeqCst), 3);
    select! {
        send(full, Noisy(&dropped)) -> _ => unreachable!(),
        default => assert_eq!(dropped.load(Ordering::SeqCst), 4),
    }
    select! {
        send(full, Noisy(&dropped)) -> _ => unreachable!(),
        after(Duration::from_millis(1)) => assert_eq!(dropped.load(Ordering::SeqCst), 5),
    }
    // A panic while the operands are evaluated drops the values evaluated so far.
    let (tx, _rx) = bounded(1);
    let panics = || if dropped.load(Ordering::SeqCst) > 0 { panic!("on purpose") } else { 1 };
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        select! {
            send(full, Noisy(&dropped)) -> _ => {}
            send(tx, panics()) -> _ => {}
        }
    }));
    assert!(panicked.is_err());
    assert_eq!(dropped.load(Ordering::SeqCst), 6);
    assert!(tx.is_empty());
}

#[test]
fn bodies_may_break_continue_return_and_use_question_marks() {
    fn first_or(rx: &Receiver<i32>, otherwise: i32) -> Result<i32, RecvError> {
        let mut rounds = 0;
        let doubled = loop {
            rounds += 1;
            select! {
                recv(rx) -> v => break v? * 2,
                default => {
                    if rounds == 3 {
                        return Ok(otherwise);
                    }
                    continue;
                }
            }
        };
        Ok(doubled)
    }
    let _dog = watchdog();
    let (tx, rx) = bounded(1);
    assert_eq!(first_or(&rx, 7), Ok(7));
    tx.send(4).unwrap();
    assert_eq!(first_or(&rx, 7), Ok(8));
    drop(tx);
    assert_eq!(first_or(&rx, 7), Err(RecvError));
}

#[test]
fn arms_may_reassign_the_channel_variable() {
    let _dog = watchdog();
    let (t1, mut c1) = bounded(3);
    let (t2, c2) = bounded(3);
    let mut c2 = Some(c2);
    for i in 0..3 {
        t1.send(i).unwrap();
        t2.send(i + 10).unwrap();
    }
    drop((t1, t2));
    let mut got = Vec::new();
    while !(c1.same_channel(&never()) && c2.is_none()) {
        let off = never();
        select! {
            recv(c1) -> v => match v {
                Ok(v) => got.push(v),
                Err(RecvError) => c1 = never(),
            },
            recv(c2.as_ref().unwrap_or(&off)) -> v => {
                if let Ok(v) = v { got.push(v) } else { c2 = None }
            }
        }
    }
    got.sort_unstable();
    assert_eq!(got, [0, 1, 2, 10, 11, 12]);
}

#[test]
fn arms_accept_places_references_and_temporaries() {
    struct Holder {
        rx: Receiver<i32>,
        tx: Sender<i32>,
    }
    let _dog = watchdog();
    let (tx, rx) = bounded(10);
    let holder = Arc::new(Holder { rx: rx.clone(), tx: tx.clone() });
    let boxed = Box::new(rx.clone());
    let shared = Arc::new(tx.clone());
    let array = [rx.clone()];
    let (_t, quiet) = bounded::<i32>(0);
    select! { send(holder.tx, 1) -> r => r.unwrap(), recv(quiet) -> _ => {} }
    select! { send(&holder.tx, 2) -> r => r.unwrap(), recv(&quiet) -> _ => {} }
    select! { send(shared, 3) -> r => r.unwrap(), recv(&&quiet) -> _ => {} }
    select! { send(*shared, 4) -> r => r.unwrap(), recv(quiet.clone()) -> _ => {} }
    select! { send({ tx.clone() }, 5) -> r => { r.unwrap() } recv(quiet,) -> _ => {} }
    select! { send(tx, 6,) -> r => r.unwrap() }
    let mut sum = 0;
    sum += select! { recv(holder.rx) -> v => v.unwrap(), recv(quiet) -> v => v.unwrap() };
    sum += select! { recv(boxed) -> v => v.unwrap(), recv(quiet) -> v => v.unwrap() };
    sum += select! { recv(array[0]) -> v => v.unwrap(), recv(quiet) -> v => v.unwrap(), };
    sum += select! { recv(&*boxed) -> v => { v.unwrap() } recv(quiet) -> v => { v.unwrap() } };
    sum += select! { recv(rx) -> v => v.unwrap() };
    sum += select! { recv(&rx) -> v => v.unwrap(), default => 0 };
    assert_eq!(sum, 21);
    assert_eq!(select! { default => 5 }, 5);
    assert_eq!(select! { default => { 6 } }, 6);
    let all_four = select! {
        recv(quiet) -> v => v.unwrap_or(0),
        send(tx, 7) -> r => { r.unwrap(); 7 }
        after(Duration::from_secs(50)) => 8,
        default => 9,
    };
    assert_eq!(all_four, 7);
}

#[test]
fn large_and_aligned_values_pass_a_select_unchanged() {
    #[repr(align(128))]
    #[derive(Clone, Copy, PartialEq, Debug)]
    struct Big([u64; 64]);
    let _dog = watchdog();
    at_all_procs(|| {
        let ((t1, c1), (t2, c2), (t3, c3)) = (bounded(0), bounded(2), unbounded());
        let sender = go(move || {
            for i in 0..500u64 {
                select! {
                    send(t1, Big([i; 64])) -> r => r.unwrap(),
                    send(t2, i as u8) -> r => r.unwrap(),
                    send(t3, ()) -> r => r.unwrap(),
                }
            }
        });
        let (mut n, mut open) = (0, [true; 3]);
        while open.contains(&true) {
            let (i, ok) = select! {
                recv(if open[0] { c1.clone() } else { never() }) -> v => {
                    let ok = v.is_ok();
                    if let Ok(v) = v {
                        assert!((&raw const v).is_aligned() && v.0.iter().all(|&x| x == v.0[0]));
                    }
                    (0, ok)
                }
                recv(if open[1] { c2.clone() } else { never() }) -> v => (1, v.is_ok()),
                recv(if open[2] { c3.clone() } else { never() }) -> v => (2, v.is_ok()),
            };
            open[i] = ok;
            n += usize::from(ok);
        }
        assert_eq!(n, 500);
        sender.join().unwrap();
    });
}

#[test]
fn a_select_of_sixty_four_arms_chooses_each() {
    macro_rules! select_all {
        ($rx:ident, $($i:literal)+) => { select! { $(recv($rx[$i]) -> v => ($i, v),)+ } };
    }
    let _dog = watchdog();
    at_all_procs(|| {
        let (senders, rx): (Vec<_>, Vec<_>) = (0..64).map(|_| bounded(0)).unzip();
        for (i, tx) in senders.iter().cloned().enumerate() {
            go(move || tx.send(i).unwrap());
        }
        let mut seen = [0; 64];
        for _ in 0..64 {
            let (i, v) = select_all!(rx,
                0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28
                29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54
                55 56 57 58 59 60 61 62 63);
            assert_eq!(v, Ok(i));
            seen[i] += 1;
        }
        assert_eq!(seen, [1; 64]);
        drop(senders);
        yield_until("all channels to be closed", || rx.iter().all(Receiver::is_closed));
    });
}

/// Anything that derefs to a channel end may stand in an arm.
#[test]
fn arms_take_what_derefs_to_a_channel_end() {
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::sync::Mutex;
    use trefoil::chan::Select;

    struct Mine(Receiver<i32>);
    impl std::ops::Deref for Mine {
        type Target = Receiver<i32>;
        fn deref(&self) -> &Receiver<i32> {
            &self.0
        }
    }
    fn both<'a>(rx: &'a &'a Receiver<i32>, tx: &Arc<Sender<i32>>) -> i32 {
        select! {
            recv(rx) -> v => v.unwrap(),
            recv(never::<i32>()) -> _ => 0,
            send(tx, 1) -> _ => 0,
        }
    }
    let (tx, rx) = bounded(1);
    let (tx, (_silent, idle)) = (Arc::new(tx), bounded::<i32>(0));
    let (boxed, shared) = (Box::new(rx.clone()), Rc::new(RefCell::new(rx.clone())));
    let (locked, mine) = (Mutex::new(rx.clone()), Mine(rx.clone()));
    let mut got = 0;
    for _ in 0..3 {
        tx.send(1).unwrap();
        got += both(&&rx, &tx);
        tx.send(1).unwrap();
        select! { recv(boxed) -> v => got += v.unwrap(), recv(idle) -> _ => {} }
        tx.send(1).unwrap();
        select! { recv(shared.borrow()) -> v => got += v.unwrap(), default => {} }
        tx.send(1).unwrap();
        select! { recv(locked.lock().unwrap()) -> v => got += v.unwrap() }
        tx.send(1).unwrap();
        select! { recv(mine) -> v => got += v.unwrap(), recv(&&idle) -> _ => {} }
        select! { send(&&tx, 1) -> r => r.unwrap(), recv(idle) -> _ => {} }
        let mut select = Select::new();
        select.recv(&mine);
        got += select.select().recv(&boxed).unwrap();
    }
    assert_eq!(got, 18);
}
