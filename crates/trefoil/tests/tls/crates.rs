//! Crates that keep state in thread-locals: rand and tracing.

use crate::common::crowd::{crowd, joined, yields};
use crate::{Gate, MANY, on_goroutines};
use rand::{Rng, RngCore};
use std::collections::HashSet;
use std::sync::atomic::Ordering::SeqCst;
use trefoil::yield_now;

#[test]
fn ten_thousand_goroutines_have_their_own_rand_generator() {
    on_goroutines(|| {
        let gate = Gate::new(MANY);
        let handles = crowd(MANY, move |_| {
            // An Rc to this goroutine's generator: a shared one would be a data race.
            let mut rng = rand::rng();
            let mut drawn = [0; 6];
            gate.pass();
            for value in &mut drawn {
                *value = rng.next_u64();
                let (low, high) = (rng.random_range(0..10), rng.random_range(10..20));
                yield_now();
                assert!(low < 10 && (10..20).contains(&high));
            }
            drawn
        });
        let drawn: HashSet<u64> = handles.into_iter().flat_map(joined).collect();
        assert_eq!(drawn.len(), 6 * MANY, "a value was drawn twice: a generator is shared");
    });
}

mod spans {
    //! A `tracing` layer that checks, at every event, that the current span has the event's owner.

    use std::fmt::Debug;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id};
    use tracing::{Event, Subscriber};
    use tracing_subscriber::Layer;
    use tracing_subscriber::layer::Context;
    use tracing_subscriber::registry::LookupSpan;

    pub(super) static RIGHT: AtomicUsize = AtomicUsize::new(0);
    pub(super) static WRONG: AtomicUsize = AtomicUsize::new(0);

    pub(super) struct Check;

    #[derive(Default)]
    struct Owner(Option<u64>);

    impl Visit for Owner {
        fn record_u64(&mut self, field: &Field, value: u64) {
            if field.name() == "owner" {
                self.0 = Some(value);
            }
        }

        fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
    }

    impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Check {
        fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
            let mut owner = Owner::default();
            attributes.record(&mut owner);
            if let Some(span) = context.span(id) {
                span.extensions_mut().insert(owner);
            }
        }

        fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
            let mut owner = Owner::default();
            event.record(&mut owner);
            let current = context.lookup_current();
            let its = current.and_then(|s| s.extensions().get::<Owner>().and_then(|o| o.0));
            let right = owner.0.is_some() && owner.0 == its;
            if right { &RIGHT } else { &WRONG }.fetch_add(1, SeqCst);
        }
    }
}

#[test]
fn ten_thousand_goroutines_stay_in_their_tracing_spans() {
    use tracing::{Dispatch, dispatcher, info, info_span};
    use tracing_subscriber::layer::SubscriberExt;
    // The registry panics beyond 4,096 threads at a time. Waves also reuse its slots.
    const WAVE: usize = 1000;
    on_goroutines(|| {
        let dispatch = Dispatch::new(tracing_subscriber::registry().with(spans::Check));
        for _ in 0..MANY / WAVE {
            let gate = Gate::new(WAVE);
            let dispatch = dispatch.clone();
            let handles = crowd(WAVE, move |i| {
                let owner = i as u64;
                let _default = dispatcher::set_default(&dispatch);
                assert!(tracing::Span::current().is_none(), "a span is entered already");
                let outer = info_span!("outer", owner);
                let entered = outer.enter();
                gate.pass();
                info!(owner, "in outer");
                {
                    let inner = info_span!("inner", owner).entered();
                    yields(2);
                    assert_eq!(tracing::Span::current().id(), inner.id());
                    info!(owner, "in inner");
                }
                yield_now();
                assert_eq!(tracing::Span::current().id(), outer.id());
                info!(owner, "in outer again");
                drop(entered);
                yield_now();
                assert!(tracing::Span::current().is_none());
            });
            handles.into_iter().for_each(joined);
        }
    });
    assert_eq!(spans::WRONG.load(SeqCst), 0, "events in another goroutine's span");
    assert_eq!(spans::RIGHT.load(SeqCst), 3 * MANY);
}
