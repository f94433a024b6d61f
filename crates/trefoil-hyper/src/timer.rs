//! `TrefoilTimer` and `TrefoilSleep`.

use hyper::rt::{Sleep, Timer};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use trefoil::time::{sleep_async, sleep_until_async};

/// The timers of trefoil's runtime, for hyper's time limits and keep-alive.
///
/// # Examples
/// ```
/// use hyper::server::conn::http1;
/// use std::time::Duration;
/// use trefoil_hyper::TrefoilTimer;
///
/// let mut builder = http1::Builder::new();
/// builder.timer(TrefoilTimer).header_read_timeout(Duration::from_secs(5));
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct TrefoilTimer;

/// The future of a [`TrefoilTimer`]: [`trefoil::time::Sleep`] with hyper's trait.
///
/// # Examples
/// ```
/// use hyper::rt::Timer;
/// use std::time::Duration;
/// use trefoil_hyper::TrefoilTimer;
///
/// trefoil::run(|| trefoil::block_on(TrefoilTimer.sleep(Duration::from_millis(1))));
/// ```
#[derive(Debug)]
pub struct TrefoilSleep(trefoil::time::Sleep);

impl Future for TrefoilSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.0).poll(context)
    }
}

impl Sleep for TrefoilSleep {}

impl Timer for TrefoilTimer {
    fn sleep(&self, d: Duration) -> Pin<Box<dyn Sleep>> {
        Box::pin(TrefoilSleep(sleep_async(d)))
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        Box::pin(TrefoilSleep(sleep_until_async(deadline)))
    }

    fn reset(&self, sleep: &mut Pin<Box<dyn Sleep>>, deadline: Instant) {
        match sleep.as_mut().downcast_mut_pin::<TrefoilSleep>() {
            Some(sleep) => Pin::new(&mut sleep.get_mut().0).reset(deadline),
            None => *sleep = self.sleep_until(deadline),
        }
    }
}
