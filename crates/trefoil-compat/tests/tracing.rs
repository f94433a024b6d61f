//! `tracing` with more goroutines than `tracing_subscriber::registry()` has room for.
//!
//! The registry keeps its spans in sharded-slab, which gives a number to each thread that creates
//! or closes a span until the thread ends. There are 4,096 numbers, and the registry has no setting
//! for it. To such a crate a goroutine is a thread, so the 4,097th live goroutine that creates a
//! span panics.
//!
//! [`Spans`] below is a subscriber without per-thread state, so it has no such limit. It does not
//! support tracing-subscriber's layers, which accept only spans of that crate's own registry.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tracing::dispatcher::{Dispatch, with_default};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use tracing_core::span::Current;
use trefoil::sync::Barrier;

/// More than twice the registry's limit.
const GOROUTINES: usize = 10_000;

/// Tables of spans: several, so that goroutines on different Ps rarely contend for a lock.
const TABLES: usize = 64;

/// A function that gets the names of the spans around an event, the outermost first.
type OnEvent = dyn Fn(&[&'static str]) + Send + Sync;

/// A subscriber that stores spans and calls a function for each event.
struct Spans {
    next_id: AtomicU64,
    tables: [Mutex<HashMap<u64, Span>>; TABLES],
    on_event: Box<OnEvent>,
}

struct Span {
    metadata: &'static Metadata<'static>,
    parent: Option<Id>,
    /// The number of handles, children and entries.
    users: usize,
}

thread_local! {
    /// The spans that this goroutine (or thread) has entered.
    static ENTERED: RefCell<Vec<Id>> = const { RefCell::new(Vec::new()) };
}

/// Returns the span that was entered last.
fn innermost() -> Option<Id> {
    ENTERED.with_borrow(|entered| entered.last().cloned())
}

impl Spans {
    fn new(on_event: impl Fn(&[&'static str]) + Send + Sync + 'static) -> Spans {
        Spans {
            next_id: AtomicU64::new(1),
            tables: std::array::from_fn(|_| Mutex::default()),
            on_event: Box::new(on_event),
        }
    }

    fn with<T>(&self, id: &Id, f: impl FnOnce(&mut HashMap<u64, Span>) -> T) -> T {
        let table = &self.tables[id.into_u64() as usize % TABLES];
        f(&mut table.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn with_span<T>(&self, id: &Id, f: impl FnOnce(&mut Span) -> T) -> Option<T> {
        self.with(id, |table| table.get_mut(&id.into_u64()).map(f))
    }

    fn len(&self) -> usize {
        self.tables.iter().map(|table| table.lock().unwrap().len()).sum()
    }
}

impl Subscriber for Spans {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let parent = match attributes.parent() {
            Some(parent) => Some(parent.clone()),
            None if attributes.is_contextual() => innermost(),
            None => None,
        };
        let parent = parent.map(|parent| self.clone_span(&parent));
        let id = Id::from_u64(self.next_id.fetch_add(1, Ordering::Relaxed));
        let span = Span { metadata: attributes.metadata(), parent, users: 1 };
        self.with(&id, |table| table.insert(id.into_u64(), span));
        id
    }

    // A subscriber that shows fields would store them here and in `new_span`.
    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut next = match event.parent() {
            Some(parent) => Some(parent.clone()),
            None if event.is_contextual() => innermost(),
            None => None,
        };
        let mut names = Vec::new();
        while let Some(id) = next {
            next = self
                .with_span(&id, |span| {
                    names.push(span.metadata.name());
                    span.parent.clone()
                })
                .flatten();
        }
        names.reverse();
        (self.on_event)(&names);
    }

    fn enter(&self, id: &Id) {
        let id = self.clone_span(id);
        ENTERED.with_borrow_mut(|entered| entered.push(id));
    }

    fn exit(&self, id: &Id) {
        let left = ENTERED.with_borrow_mut(|entered| {
            let place = entered.iter().rposition(|entered| entered == id)?;
            Some(entered.remove(place))
        });
        if let Some(left) = left {
            self.try_close(left);
        }
    }

    fn clone_span(&self, id: &Id) -> Id {
        self.with_span(id, |span| span.users += 1);
        id.clone()
    }

    fn try_close(&self, id: Id) -> bool {
        let mut next = Some(id);
        let mut closed = false;
        // A child counts as a user of its parent.
        while let Some(id) = next.take() {
            let last = self.with(&id, |table| {
                let span = table.get_mut(&id.into_u64())?;
                span.users -= 1;
                if span.users == 0 { table.remove(&id.into_u64()) } else { None }
            });
            if let Some(span) = last {
                closed = true;
                next = span.parent;
            }
        }
        closed
    }

    fn current_span(&self) -> Current {
        let current = innermost()
            .and_then(|id| self.with_span(&id, |span| Current::new(id.clone(), span.metadata)));
        current.unwrap_or_else(Current::none)
    }
}

/// Calls `f` with its number on each of [`GOROUTINES`] goroutines.
fn run(f: impl Fn(usize) + Send + Sync + 'static) {
    let runtime = trefoil::Runtime::builder().procs(4).build().unwrap();
    runtime.run(|| {
        let f = Arc::new(f);
        let all: Vec<_> = (0..GOROUTINES)
            .map(|i| {
                let f = f.clone();
                trefoil::go(move || f(i))
            })
            .collect();
        all.into_iter().for_each(|goroutine| goroutine.join().unwrap());
    });
}

#[test]
fn a_subscriber_without_per_thread_state_serves_ten_thousand_goroutines() {
    let (events, wrong) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let spans = Spans::new({
        let (events, wrong) = (events.clone(), wrong.clone());
        move |names| {
            events.fetch_add(1, Ordering::Relaxed);
            if names != ["request", "query"] {
                wrong.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let dispatch = Dispatch::new(spans);
    let all_entered = Barrier::new(GOROUTINES);
    run({
        let dispatch = dispatch.clone();
        move |i| {
            with_default(&dispatch, || {
                let request = tracing::info_span!("request", i).entered();
                let query = tracing::info_span!("query").entered();
                assert_eq!(tracing::Span::current().id(), query.id());
                all_entered.wait();
                tracing::info!("all goroutines have entered");
                drop(query);
                assert_eq!(tracing::Span::current().id(), request.id());
            });
        }
    });
    let counts = (events.load(Ordering::Relaxed), wrong.load(Ordering::Relaxed));
    assert_eq!(counts, (GOROUTINES, 0));
    assert_eq!(dispatch.downcast_ref::<Spans>().unwrap().len(), 0, "spans are still open");
}
