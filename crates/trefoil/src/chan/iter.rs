//! Iterators over a receiver.

use super::Receiver;
use std::iter::FusedIterator;

/// An iterator over received values, returned by [`Receiver::iter`].
///
/// It waits for each value, and ends when the channel is closed and empty.
///
/// # Examples
/// ```
/// let (tx, rx) = trefoil::chan::bounded(2);
/// tx.send("one").unwrap();
/// tx.send("two").unwrap();
/// drop(tx);
/// let mut words = rx.iter();
/// assert_eq!(words.next(), Some("one"));
/// assert_eq!(words.next(), Some("two"));
/// assert_eq!(words.next(), None); // closed and empty
/// ```
#[derive(Debug)]
pub struct Iter<'a, T> {
    pub(super) receiver: &'a Receiver<T>,
}

/// An iterator over the values that can be received without waiting, returned by
/// [`Receiver::try_iter`].
///
/// It ends when the channel is empty. It may return values again when more are sent.
///
/// # Examples
/// ```
/// let (tx, rx) = trefoil::chan::bounded(2);
/// let mut values = rx.try_iter();
/// assert_eq!(values.next(), None); // empty, but open
/// tx.send(1).unwrap();
/// assert_eq!(values.next(), Some(1));
/// ```
#[derive(Debug)]
pub struct TryIter<'a, T> {
    pub(super) receiver: &'a Receiver<T>,
}

/// An iterator over received values that owns its receiver, made by `for v in rx`.
///
/// It waits for each value, and ends when the channel is closed and empty.
///
/// # Drop
/// Dropping the iterator drops its receiver, for example at a `break` out of the loop.
///
/// # Examples
/// ```
/// trefoil::run(|| {
///     let (tx, rx) = trefoil::chan::bounded(0);
///     let sender = trefoil::go(move || (1..).take_while(|&n| tx.send(n).is_ok()).count());
///     for n in rx {
///         if n == 3 {
///             break; // drops the receiver: the next send fails
///         }
///     }
///     assert_eq!(sender.join().unwrap(), 3);
/// });
/// ```
#[derive(Debug)]
pub struct IntoIter<T> {
    receiver: Receiver<T>,
}

impl<T> Iterator for Iter<'_, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        self.receiver.recv().ok()
    }
}

impl<T> Iterator for TryIter<'_, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        self.receiver.try_recv().ok()
    }
}

impl<T> Iterator for IntoIter<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        self.receiver.recv().ok()
    }
}

// A closed channel stays closed.
impl<T> FusedIterator for Iter<'_, T> {}
impl<T> FusedIterator for IntoIter<T> {}

impl<'a, T> IntoIterator for &'a Receiver<T> {
    type Item = T;
    type IntoIter = Iter<'a, T>;

    fn into_iter(self) -> Iter<'a, T> {
        self.iter()
    }
}

impl<T> IntoIterator for Receiver<T> {
    type Item = T;
    type IntoIter = IntoIter<T>;

    fn into_iter(self) -> IntoIter<T> {
        IntoIter { receiver: self }
    }
}
