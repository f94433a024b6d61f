//! Labels: keys and values that say what a goroutine or task works on.
//!
//! [`labels!`](crate::labels!) attaches them for a scope. Goroutines and tasks that are started in
//! the scope inherit them. They are shown in [dumps](crate::debug::dump), in the [goroutine
//! profile](crate::debug::profile), and in every [profile](crate::profile): `go tool pprof
//! -tagfocus=tenant=acme` shows the CPU time of one tenant.
//!
//! ```
//! trefoil::run(|| {
//!     let _labels = trefoil::labels! { "tenant" => "acme", "request" => 17 };
//!     let child = trefoil::go(|| trefoil::labels::get("tenant"));
//!     assert_eq!(child.join().unwrap().as_deref(), Some("acme"));
//! });
//! ```
//!
//! Labels belong to a goroutine or to a [task](crate::task). A task keeps them from poll to poll,
//! so a scope may contain an `.await`. A task of a `LocalSet`, and a future in
//! [`block_on`](crate::block_on), have the labels of the goroutine that polls them. On a plain
//! thread labels are ignored.
//!
//! # Cost
//! Without labels, nothing: one word of a goroutine is null. A scope allocates its set of labels,
//! and takes some hundred nanoseconds.

use crate::sched::labels::{self, LabelGuard, LabelSet};
use std::fmt::{self, Display};
use std::sync::Arc;

/// Labels of the running goroutine or task, until this is dropped.
/// [`labels!`](crate::labels!) returns it.
///
/// Drop it in the goroutine or task that made it, and the last one first, as scopes do by
/// themselves. Elsewhere, or in another order, dropping it changes nothing, and its labels stay
/// until an outer one is dropped or the goroutine ends.
///
/// ```
/// trefoil::run(|| {
///     let labels: trefoil::labels::Labels = trefoil::labels! { "phase" => "parse" };
///     assert!(trefoil::debug::dump().contains(r#"labels: {"phase":"parse"}"#));
///     drop(labels);
///     assert!(!trefoil::debug::dump().contains("labels:"));
/// });
/// ```
#[must_use = "the labels are removed when this is dropped"]
pub struct Labels {
    _guard: Option<LabelGuard>,
}

impl fmt::Debug for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Labels")
    }
}

impl Labels {
    #[doc(hidden)]
    pub fn __set(new: &[(&dyn Display, &dyn Display)]) -> Labels {
        Labels { _guard: LabelGuard::set(|present| merge(present, new)) }
    }
}

/// Returns the labels in `present` and `new`. If a key occurs in both, or twice, the last value
/// counts.
fn merge(present: &LabelSet, new: &[(&dyn Display, &dyn Display)]) -> Arc<LabelSet> {
    let mut all: Vec<(Box<str>, Box<str>)> = present.to_vec();
    for (key, value) in new {
        let (key, value) = (key.to_string().into_boxed_str(), value.to_string().into_boxed_str());
        match all.binary_search_by(|(known, _)| known.cmp(&key)) {
            Ok(at) => all[at].1 = value,
            Err(at) => all.insert(at, (key, value)),
        }
    }
    all.into()
}

/// Returns the value of a label of the running goroutine or task. None if it has no such label, and
/// on a plain thread.
///
/// ```
/// trefoil::run(|| {
///     let _outer = trefoil::labels! { "user" => "ann", "path" => "/" };
///     let inner = trefoil::labels! { "path" => "/login" };
///     assert_eq!(trefoil::labels::get("user").as_deref(), Some("ann"));
///     assert_eq!(trefoil::labels::get("path").as_deref(), Some("/login"));
///     drop(inner);
///     assert_eq!(trefoil::labels::get("path").as_deref(), Some("/"));
/// });
/// ```
pub fn get(key: &str) -> Option<String> {
    let labels = labels::current()?;
    let set = labels.set();
    let at = set.binary_search_by(|(known, _)| (**known).cmp(key)).ok()?;
    Some(set[at].1.to_string())
}

/// Attaches [labels](mod@crate::labels) to the running goroutine or task. Keys and values are
/// anything that can be displayed.
///
/// `labels! { key => value, … }` returns a [`Labels`](crate::labels::Labels), and the labels stay
/// until it is dropped. `labels!(key => value, …; closure)` calls the closure with the labels, and
/// returns its value. They are added to the labels of the enclosing scope; a key that is there
/// already gets the new value.
///
/// ```
/// fn handle(request: u64) -> u64 {
///     request * 2
/// }
///
/// trefoil::run(|| {
///     let _labels = trefoil::labels! { "route" => "/double" };
///     let answer = trefoil::labels!("request" => 21; || handle(21));
///     assert_eq!(answer, 42);
/// });
/// ```
///
/// In a task:
/// ```
/// trefoil::run(|| {
///     let task = trefoil::task::spawn(async {
///         let _labels = trefoil::labels! { "job" => "index" };
///         trefoil::task::yield_now().await; // The next poll may be on another thread.
///         trefoil::labels::get("job")
///     });
///     assert_eq!(task.join().unwrap().as_deref(), Some("index"));
/// });
/// ```
#[macro_export]
macro_rules! labels {
    ($($key:expr => $value:expr),+ $(,)?) => {
        $crate::labels::Labels::__set(&[$((&$key, &$value)),+])
    };
    ($($key:expr => $value:expr),+ $(,)?; $closure:expr) => {{
        let _labels = $crate::labels::Labels::__set(&[$((&$key, &$value)),+]);
        ($closure)()
    }};
}
