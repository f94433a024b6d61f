//! `select!` and `select_biased!`.
//!
//! The arms are parsed one by one (a `recv`, `send` or `future` with its `->`, a body that is a
//! block or ends with a comma) into records
//! `{index slot (new slot) (arm) (pattern) (body) (operation)}`. `$prefer` says which of several
//! ready arms is taken: `any` or `first`. `$done` are the records so far, and `$is` the indices
//! that are left. Each step of the parser makes its own `slot`: by macro hygiene they are different
//! variables. Then one of the `@build` rules makes the code:
//!
//! ```text
//! {
//!     let (chosen, slot, slot, …) = {
//!         let mut slot = RecvSlot::new(); …              room for the values, in this frame
//!         let chosen = match [slot.recv(&rx), …] { mut arms => choose(&mut arms) };
//!         (chosen, slot.finish(), …)                     values of other arms are dropped
//!     };
//!     match chosen.index() { 0 => { let pattern = chosen.take(slot); body } … }
//! }
//! ```
//!
//! So every channel and value is evaluated once, in the order in which it is written. Nothing is
//! borrowed any more when a body runs. A body is ordinary code of the caller: it may `return`,
//! `break`, use `?`. The expansion contains no `unsafe` code.
//!
//! The parser recurses once per arm, so 64 arms stay below the default `recursion_limit`.

/// Waits for the first of several channel operations and futures, and does it.
///
/// ```text
/// let x = select! {
///     recv(rx) -> v => …,             v: Result<T, RecvError>
///     send(tx, value) -> r => …,      r: Result<(), SendError<T>>
///     future(f) -> v => …,            v: the output of the future
///     after(duration) => …,
///     default => …,
/// };
/// ```
///
/// - If several operations or futures are ready, one of them is chosen at random, each with the
///   same probability.
/// - An operation on a closed channel is ready; its result is an error. Assign
///   [`never()`](crate::chan::never) to a receiver to turn its arm off.
/// - `future` takes anything that can be awaited. The goroutine or thread of the select polls it,
///   as [`block_on`](crate::block_on) does; no other goroutine is started. A future that is not
///   chosen is dropped before the body runs. To keep it, pin it outside and pass a reference:
///   `future(pinned.as_mut())`, or `future(&mut handle)` for a
///   [`JoinHandle`](crate::JoinHandle). Do not pass a future again that was chosen. A wake-up of
///   one of the futures polls all of them.
/// - `after` is chosen if no operation was ready for that duration. If there are several, the
///   shortest counts.
/// - `default` is chosen if no operation is ready now. It must be the last arm. With it the select
///   does not wait, each future is polled once, and `after` is never chosen.
/// - `select! {}` waits forever.
/// - Channels may be variables, other places, or references. All channels, values and futures are
///   evaluated once, in the order in which they are written, before any operation happens. The
///   value of a `send` that is not chosen is dropped.
/// - A body is ordinary code of the enclosing function: it may `break`, `return`, use `?`, and
///   assign to the channel variables. A body that is a block needs no comma. The value of the
///   chosen body is the value of the select.
/// - There may be up to 64 arms. [`chan::Select`](crate::chan::Select) takes more, and a number
///   that is not known in advance.
///
/// # Panics
/// Panics if a future panics, or the destructor of a future or value that is not chosen.
///
/// # Examples
/// A goroutine that sends values until it is told to stop:
/// ```
/// use trefoil::chan::{bounded, unbounded};
/// use trefoil::select;
///
/// trefoil::run(|| {
///     let (results, got) = bounded(0);
///     let (stop, stopped) = unbounded::<()>();
///     trefoil::go(move || {
///         let mut n = 0;
///         loop {
///             select! {
///                 send(results, n) -> sent => {
///                     if sent.is_err() {
///                         return;
///                     }
///                     n += 1;
///                 }
///                 recv(stopped) -> _ => return,
///             }
///         }
///     });
///     let sum: i32 = (0..10).map(|_| got.recv().unwrap()).sum();
///     assert_eq!(sum, 45);
///     drop(stop);
/// });
/// ```
/// A receive with a time limit:
/// ```
/// use std::time::Duration;
/// use trefoil::chan::bounded;
/// use trefoil::select;
///
/// let (_tx, silent) = bounded::<i32>(0);
/// let value = select! {
///     recv(silent) -> v => v.ok(),
///     after(Duration::from_millis(1)) => None,
/// };
/// assert_eq!(value, None);
/// ```
/// Futures beside a channel. Each turn of the loop waits for the same `idle`:
/// ```
/// use std::pin::pin;
/// use std::time::Duration;
/// use trefoil::chan::bounded;
/// use trefoil::select;
/// use trefoil::time::sleep_async;
///
/// trefoil::run(|| {
///     let (tx, requests) = bounded(0);
///     trefoil::go(move || tx.send("first request").unwrap());
///     let mut idle = pin!(sleep_async(Duration::from_millis(20)));
///     let mut served = 0;
///     loop {
///         select! {
///             recv(requests) -> request => match request {
///                 Ok(_) => served += 1,
///                 Err(_) => break, // no sender is left
///             },
///             future(idle.as_mut()) -> () => break,
///         }
///     }
///     assert_eq!(served, 1);
///
///     let task = trefoil::task::spawn(async { 6 * 7 });
///     let answer = select! {
///         future(task) -> answer => answer.unwrap(),
///         future(sleep_async(Duration::from_secs(10))) -> () => 0,
///     };
///     assert_eq!(answer, 42);
/// });
/// ```
/// The wrong end of a channel, or a value of the wrong type, does not compile:
/// ```compile_fail,E0277
/// let (tx, _rx) = trefoil::chan::bounded::<i32>(0);
/// trefoil::select! { recv(tx) -> _ => {} } // `recv(…)` takes a `Receiver`
/// ```
/// ```compile_fail,E0308
/// let (tx, _rx) = trefoil::chan::bounded::<i32>(0);
/// trefoil::select! { send(tx, "text") -> _ => {} }
/// ```
#[macro_export]
macro_rules! select {
    () => { $crate::chan::select::no_cases() };
    ($($arms:tt)+) => {
        $crate::__select!(@parse any []
            [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
             32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59
             60 61 62 63]
            $($arms)+)
    };
}

/// As [`select!`](crate::select), but if several operations or futures are ready, takes the first
/// of them as they are written.
///
/// Use it where one channel comes before another: a `quit` that must not be delayed by work, urgent
/// requests before others. An arm that is ready again and again starves the arms below it.
///
/// The arms are those of [`select!`](crate::select). `after` and `default` are chosen only if no
/// operation is ready, wherever they stand. If the select has to wait, the first arm that becomes
/// ready ends the wait.
///
/// # Examples
/// ```
/// use trefoil::chan::bounded;
/// use trefoil::select_biased;
///
/// let (urgent, first) = bounded(8);
/// let (normal, second) = bounded(8);
/// (0..3).for_each(|n| normal.send(n).unwrap());
/// (10..13).for_each(|n| urgent.send(n).unwrap());
/// let next = || {
///     select_biased! {
///         recv(first) -> n => n.ok(),
///         recv(second) -> n => n.ok(),
///         default => None,
///     }
/// };
/// let order: Vec<i32> = std::iter::from_fn(next).collect();
/// assert_eq!(order, [10, 11, 12, 0, 1, 2]);
/// ```
#[macro_export]
macro_rules! select_biased {
    () => { $crate::chan::select::no_cases() };
    ($($arms:tt)+) => {
        $crate::__select!(@parse first []
            [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
             32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59
             60 61 62 63]
            $($arms)+)
    };
}

/// The parser of [`select!`](crate::select); see the head of the file.
#[doc(hidden)]
#[macro_export]
macro_rules! __select {
    // ---- The end: no default, or the default, which is last.
    (@parse $prefer:tt $done:tt $is:tt) => { $crate::__select!(@build $prefer $done []) };
    (@parse $prefer:tt $done:tt $is:tt default => $body:block $(,)?) => {
        $crate::__select!(@build $prefer $done [$body])
    };
    (@parse $prefer:tt $done:tt $is:tt default => $body:expr $(,)?) => {
        $crate::__select!(@build $prefer $done [$body])
    };

    // ---- One arm.
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*]
        recv($c:expr $(,)?) -> $p:pat => $body:block, $($rest:tt)*) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot ($crate::chan::select::RecvSlot::new()) (slot.recv(&$c))
                ($p) ($body) (recv $c)}]
            [$($is)*] $($rest)*)
    };
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*]
        recv($c:expr $(,)?) -> $p:pat => $body:block $($rest:tt)*) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot ($crate::chan::select::RecvSlot::new()) (slot.recv(&$c))
                ($p) ($body) (recv $c)}]
            [$($is)*] $($rest)*)
    };
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*]
        recv($c:expr $(,)?) -> $p:pat => $body:expr, $($rest:tt)*) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot ($crate::chan::select::RecvSlot::new()) (slot.recv(&$c))
                ($p) ($body) (recv $c)}]
            [$($is)*] $($rest)*)
    };
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*] recv($c:expr $(,)?) -> $p:pat => $body:expr) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot ($crate::chan::select::RecvSlot::new()) (slot.recv(&$c))
                ($p) ($body) (recv $c)}]
            [$($is)*] )
    };
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*]
        send($c:expr, $v:expr $(,)?) -> $p:pat => $body:block, $($rest:tt)*) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot ($crate::chan::select::SendSlot::new()) (slot.send(&$c, $v))
                ($p) ($body) (send $c, $v)}]
            [$($is)*] $($rest)*)
    };
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*]
        send($c:expr, $v:expr $(,)?) -> $p:pat => $body:block $($rest:tt)*) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot ($crate::chan::select::SendSlot::new()) (slot.send(&$c, $v))
                ($p) ($body) (send $c, $v)}]
            [$($is)*] $($rest)*)
    };
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*]
        send($c:expr, $v:expr $(,)?) -> $p:pat => $body:expr, $($rest:tt)*) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot ($crate::chan::select::SendSlot::new()) (slot.send(&$c, $v))
                ($p) ($body) (send $c, $v)}]
            [$($is)*] $($rest)*)
    };
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*]
        send($c:expr, $v:expr $(,)?) -> $p:pat => $body:expr) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot ($crate::chan::select::SendSlot::new()) (slot.send(&$c, $v))
                ($p) ($body) (send $c, $v)}]
            [$($is)*] )
    };
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*]
        future($f:expr $(,)?) -> $p:pat => $body:block, $($rest:tt)*) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot (::core::pin::pin!($crate::chan::select::FutureSlot::new()))
                (slot.as_mut().future($f)) ($p) ($body) (future $f)}]
            [$($is)*] $($rest)*)
    };
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*]
        future($f:expr $(,)?) -> $p:pat => $body:block $($rest:tt)*) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot (::core::pin::pin!($crate::chan::select::FutureSlot::new()))
                (slot.as_mut().future($f)) ($p) ($body) (future $f)}]
            [$($is)*] $($rest)*)
    };
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*]
        future($f:expr $(,)?) -> $p:pat => $body:expr, $($rest:tt)*) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot (::core::pin::pin!($crate::chan::select::FutureSlot::new()))
                (slot.as_mut().future($f)) ($p) ($body) (future $f)}]
            [$($is)*] $($rest)*)
    };
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*] future($f:expr $(,)?) -> $p:pat => $body:expr) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot (::core::pin::pin!($crate::chan::select::FutureSlot::new()))
                (slot.as_mut().future($f)) ($p) ($body) (future $f)}]
            [$($is)*] )
    };
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*]
        after($d:expr $(,)?) => $body:block, $($rest:tt)*) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot ($crate::chan::select::AfterSlot) (slot.after($d))
                (()) ($body) (after $d)}]
            [$($is)*] $($rest)*)
    };
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*] after($d:expr $(,)?) => $body:block $($rest:tt)*) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot ($crate::chan::select::AfterSlot) (slot.after($d))
                (()) ($body) (after $d)}]
            [$($is)*] $($rest)*)
    };
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*] after($d:expr $(,)?) => $body:expr, $($rest:tt)*) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot ($crate::chan::select::AfterSlot) (slot.after($d))
                (()) ($body) (after $d)}]
            [$($is)*] $($rest)*)
    };
    (@parse $prefer:tt [$($done:tt)*] [$i:tt $($is:tt)*] after($d:expr $(,)?) => $body:expr) => {
        $crate::__select!(@parse $prefer
            [$($done)* {$i slot ($crate::chan::select::AfterSlot) (slot.after($d))
                (()) ($body) (after $d)}]
            [$($is)*] )
    };

    // ---- Errors, with a message.
    (@parse $prefer:tt $done:tt [] $($rest:tt)*) => {
        compile_error!("select!: more than 64 arms; trefoil::chan::Select takes any number")
    };
    (@parse $prefer:tt $done:tt $is:tt default => $body:block default $($rest:tt)*) => {
        compile_error!("select!: there is a second `default`")
    };
    (@parse $prefer:tt $done:tt $is:tt default => $body:expr, default $($rest:tt)*) => {
        compile_error!("select!: there is a second `default`")
    };
    (@parse $prefer:tt $done:tt $is:tt default => $body:block $($rest:tt)*) => {
        compile_error!("select!: `default` must be the last arm")
    };
    (@parse $prefer:tt $done:tt $is:tt default => $body:expr, $($rest:tt)*) => {
        compile_error!("select!: `default` must be the last arm")
    };
    (@parse $prefer:tt $done:tt $is:tt default($($limit:tt)*) $($rest:tt)*) => {
        compile_error!(concat!(
            "select!: for a time limit write `after(duration) => …`, ",
            "and `default => …` for none"
        ))
    };
    (@parse $prefer:tt $done:tt $is:tt default $($rest:tt)*) => {
        compile_error!("select!: write `default => …`")
    };
    (@parse $prefer:tt $done:tt $is:tt recv($c:expr, $($more:tt)+) $($rest:tt)*) => {
        compile_error!("select!: `recv` takes one channel: `recv(rx) -> v => …`")
    };
    (@parse $prefer:tt $done:tt $is:tt recv($c:expr) => $($rest:tt)*) => {
        compile_error!("select!: `recv` needs a name for its result: `recv(rx) -> v => …`")
    };
    (@parse $prefer:tt $done:tt $is:tt recv($c:expr) -> $p:pat => $($rest:tt)*) => {
        compile_error!(concat!(
            "select!: a comma is missing after the body of a `recv` arm ",
            "(only a block needs none)"
        ))
    };
    (@parse $prefer:tt $done:tt $is:tt recv $($rest:tt)*) => {
        compile_error!("select!: write `recv(rx) -> v => …`")
    };
    (@parse $prefer:tt $done:tt $is:tt send($c:expr) $($rest:tt)*) => {
        compile_error!("select!: `send` needs a value: `send(tx, value) -> r => …`")
    };
    (@parse $prefer:tt $done:tt $is:tt send($c:expr, $v:expr) => $($rest:tt)*) => {
        compile_error!("select!: `send` needs a name for its result: `send(tx, value) -> r => …`")
    };
    (@parse $prefer:tt $done:tt $is:tt send($c:expr, $v:expr) -> $p:pat => $($rest:tt)*) => {
        compile_error!(concat!(
            "select!: a comma is missing after the body of a `send` arm ",
            "(only a block needs none)"
        ))
    };
    (@parse $prefer:tt $done:tt $is:tt send $($rest:tt)*) => {
        compile_error!("select!: write `send(tx, value) -> r => …`")
    };
    (@parse $prefer:tt $done:tt $is:tt future($f:expr, $($more:tt)+) $($rest:tt)*) => {
        compile_error!("select!: `future` takes one future: `future(f) -> v => …`")
    };
    (@parse $prefer:tt $done:tt $is:tt future($f:expr) => $($rest:tt)*) => {
        compile_error!("select!: `future` needs a name for its result: `future(f) -> v => …`")
    };
    (@parse $prefer:tt $done:tt $is:tt future($f:expr) -> $p:pat => $($rest:tt)*) => {
        compile_error!(concat!(
            "select!: a comma is missing after the body of a `future` arm ",
            "(only a block needs none)"
        ))
    };
    (@parse $prefer:tt $done:tt $is:tt future $($rest:tt)*) => {
        compile_error!("select!: write `future(f) -> v => …`")
    };
    (@parse $prefer:tt $done:tt $is:tt after($d:expr) -> $($rest:tt)*) => {
        compile_error!("select!: `after` has no result: `after(duration) => …`")
    };
    (@parse $prefer:tt $done:tt $is:tt after($d:expr) => $($rest:tt)*) => {
        compile_error!(concat!(
            "select!: a comma is missing after the body of an `after` arm ",
            "(only a block needs none)"
        ))
    };
    (@parse $prefer:tt $done:tt $is:tt after $($rest:tt)*) => {
        compile_error!("select!: write `after(duration) => …`")
    };
    (@parse $prefer:tt $done:tt $is:tt $other:tt $($rest:tt)*) => {
        compile_error!(concat!(
            "select!: expected `recv(rx) -> v`, `send(tx, value) -> r`, `future(f) -> v`, ",
            "`after(duration)` or `default`, found `",
            stringify!($other),
            "`"
        ))
    };

    // ---- Short forms: one operation, alone, with a default, or with a time limit.
    (@build $prefer:tt [] [$default:expr]) => { $default };
    (@build $prefer:tt [{$i:tt $s:ident $n:tt $a:tt ($p:pat) ($body:expr) (recv $c:expr)}] []) => {{
        let $p = $crate::chan::select::recv_one(&$c);
        $body
    }};
    (@build $prefer:tt [{$i:tt $s:ident $n:tt $a:tt ($p:pat) ($body:expr) (send $c:expr, $v:expr)}] []) => {{
        let $p = $crate::chan::select::send_one(&$c, $v);
        $body
    }};
    (@build $prefer:tt [{$i:tt $s:ident $n:tt $a:tt
        ($p:pat) ($body:expr) (recv $c:expr)}] [$default:expr]) => {{
        let chosen = $crate::chan::select::try_recv_one(&$c);
        match chosen {
            ::core::option::Option::Some($p) => $body,
            ::core::option::Option::None => $default,
        }
    }};
    (@build $prefer:tt [{$i:tt $s:ident $n:tt $a:tt
        ($p:pat) ($body:expr) (send $c:expr, $v:expr)}] [$default:expr]) => {{
        let chosen = $crate::chan::select::try_send_one(&$c, $v);
        match chosen {
            ::core::option::Option::Some($p) => $body,
            ::core::option::Option::None => $default,
        }
    }};
    (@build $prefer:tt [
        {$i:tt $s:ident $n:tt $a:tt ($p:pat) ($body:expr) (recv $c:expr)}
        {$j:tt $t:ident $m:tt $b:tt $q:tt ($late:expr) (after $d:expr)}
    ] []) => {{
        let chosen = $crate::chan::select::recv_within(&$c, $d);
        match chosen {
            ::core::option::Option::Some($p) => $body,
            ::core::option::Option::None => $late,
        }
    }};
    (@build $prefer:tt [
        {$i:tt $s:ident $n:tt $a:tt ($p:pat) ($body:expr) (send $c:expr, $v:expr)}
        {$j:tt $t:ident $m:tt $b:tt $q:tt ($late:expr) (after $d:expr)}
    ] []) => {{
        let chosen = $crate::chan::select::send_within(&$c, $v, $d);
        match chosen {
            ::core::option::Option::Some($p) => $body,
            ::core::option::Option::None => $late,
        }
    }};

    // ---- The general form.
    (@build any [$($arm:tt)+] []) => {
        $crate::__select!(@general choose ($crate::chan::select::unchosen()) $($arm)+)
    };
    (@build any [$($arm:tt)+] [$default:expr]) => {
        $crate::__select!(@general choose_or_default ($default) $($arm)+)
    };
    (@build first [$($arm:tt)+] []) => {
        $crate::__select!(@general choose_first ($crate::chan::select::unchosen()) $($arm)+)
    };
    (@build first [$($arm:tt)+] [$default:expr]) => {
        $crate::__select!(@general choose_first_or_default ($default) $($arm)+)
    };
    (@general $choose:ident ($otherwise:expr)
        $({$i:tt $s:ident ($new:expr) ($arm:expr) ($p:pat) ($body:expr) $what:tt})+
    ) => {{
        let (chosen, $($s),+) = {
            $(let mut $s = $new;)+
            let chosen = match [$($arm),+] {
                mut arms => $crate::chan::select::$choose(&mut arms),
            };
            (chosen, $($s.finish()),+)
        };
        match chosen.index() {
            $($i => {
                let $p = chosen.take($s);
                $body
            })+
            _ => $otherwise,
        }
    }};
}
