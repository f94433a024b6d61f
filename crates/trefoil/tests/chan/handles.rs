//! The interface of the handles: iterators, errors, traits.

use std::time::Duration;
use trefoil::chan::{
    Receiver, RecvError, RecvTimeoutError, SendError, Sender, TryRecvError, TrySendError, bounded,
    never,
};

#[test]
fn iterators_receive_in_order_and_end_at_close() {
    let (tx, rx) = bounded(10);
    (0..6).for_each(|i| tx.send(i).unwrap());
    assert_eq!(rx.try_iter().take(2).collect::<Vec<_>>(), [0, 1]);
    drop(tx);
    let mut n = 2;
    for v in &rx {
        assert_eq!(v, n);
        n += 1;
        if n == 4 {
            break;
        }
    }
    assert_eq!(rx.into_iter().collect::<Vec<_>>(), [4, 5]);
}

#[test]
fn errors_name_the_cause_and_return_the_value() {
    use std::error::Error;
    struct Opaque; // neither Debug nor Clone
    fn text<E: Error>(e: E) -> (String, String) {
        (e.to_string(), format!("{e:?}"))
    }
    let (tx, rx) = bounded(0);
    assert!(text(tx.try_send(Opaque).unwrap_err()).0.contains("full"));
    assert!(text(tx.send_timeout(Opaque, Duration::ZERO).unwrap_err()).0.contains("timed out"));
    assert!(text(rx.try_recv().map(|_| ()).unwrap_err()).0.contains("empty"));
    tx.close();
    let closed = text(tx.send(Opaque).unwrap_err());
    assert_eq!(closed, ("sending on a closed channel".into(), "SendError(..)".into()));
    assert!(text(rx.recv().map(|_| ()).unwrap_err()).0.contains("closed"));
    let Opaque = tx.send(Opaque).unwrap_err().into_inner();
    let Opaque = tx.try_send(Opaque).unwrap_err().into_inner();
    assert_eq!(TryRecvError::from(RecvError), TryRecvError::Closed);
    assert_eq!(RecvTimeoutError::from(RecvError), RecvTimeoutError::Closed);
    assert!(TrySendError::from(SendError(1)).is_closed());
    assert_eq!(format!("{tx:?} {rx:?}"), "Sender { .. } Receiver { .. }");
}

#[test]
fn handles_are_send_and_sync_for_values_that_are_send() {
    fn check<T: Send + Sync + std::panic::UnwindSafe>() {}
    check::<Sender<std::cell::Cell<i32>>>();
    check::<Receiver<std::cell::Cell<i32>>>();
}

#[test]
fn same_channel_is_true_for_clones_only() {
    let ((a, ra), (b, rb)) = (bounded::<i32>(0), bounded::<i32>(0));
    assert!(a.same_channel(&a.clone()) && !a.same_channel(&b));
    assert!(ra.same_channel(&ra.clone()) && !ra.same_channel(&rb) && !ra.same_channel(&never()));
}
