//! After Ctrl-C the program starts no new jobs, gives the running ones a second to finish, and
//! ends.
//!
//! `cargo run --release --example graceful_shutdown`, then Ctrl-C.

use std::sync::Arc;
use std::time::Duration;
use trefoil::context::Context;
use trefoil::sync::WaitGroup;

#[trefoil::main]
fn main() -> std::io::Result<()> {
    let stop = trefoil::signal::notify(&[libc::SIGINT, libc::SIGTERM])?;
    let (ctx, cancel) = Context::background().with_cancel();
    let jobs = Arc::new(WaitGroup::new());
    let source = trefoil::go({
        let jobs = jobs.clone();
        move || {
            let mut started = 0;
            loop {
                trefoil::select! {
                    recv(ctx.done()) -> _ => return started,
                    after(Duration::from_millis(10)) => {}
                }
                started += 1;
                jobs.go(|| trefoil::time::sleep(Duration::from_millis(200)));
            }
        }
    });
    println!("working");
    let _ = stop.recv();
    cancel.cancel();
    let started = source.join().unwrap();
    println!("stopping");
    let finished = trefoil::time::timeout(Duration::from_secs(1), move || jobs.wait()).is_ok();
    println!("{started} jobs started, all finished: {finished}");
    Ok(())
}
