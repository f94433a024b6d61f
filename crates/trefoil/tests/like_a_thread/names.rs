//! What std knows of a goroutine: its name.

use crate::common::{join_all, runtime, tasks};
use std::collections::HashSet;
use std::thread;
use trefoil::{Builder, go};

fn own_name() -> Option<String> {
    thread::current().name().map(str::to_owned)
}

fn named(name: &str) -> Option<String> {
    Builder::new().name(name).go(own_name).unwrap().join().unwrap()
}

#[test]
fn std_knows_the_name_of_a_goroutine() {
    trefoil::run(|| {
        assert_eq!(own_name().as_deref(), Some("main"));
        assert_eq!(go(own_name).join().unwrap(), None);
        assert_eq!(named("short").as_deref(), Some("short"));
        let long = "longer than the name of an OS thread, with ä and 日";
        assert_eq!(named(long).as_deref(), Some(long));
        assert_eq!(named("").as_deref(), Some(""));
        assert_eq!(named("zero\0inside"), None);
        trefoil::scope(|s| {
            let scoped = Builder::new().name("scoped").go_scoped(s, own_name).unwrap();
            assert_eq!(scoped.join().unwrap().as_deref(), Some("scoped"));
        });
    });
}

#[test]
fn a_named_goroutine_renames_no_os_thread() {
    let own = "goroutine 7";
    runtime(1).run(|| {
        let names = Builder::new().name(own).go(|| (own_name(), tasks())).unwrap();
        let (name, tasks) = names.join().unwrap();
        assert_eq!(name.as_deref(), Some(own));
        assert!(tasks.iter().all(|(_, name)| name != own), "{tasks:?}");
    });
}

#[test]
fn a_named_goroutine_is_one_thread_to_std_wherever_it_runs() {
    trefoil::run(|| {
        let goroutines: Vec<_> = (0..200)
            .map(|i| {
                let body = move || {
                    let before = thread::current().id();
                    for _ in 0..20 {
                        trefoil::yield_now();
                        assert_eq!(thread::current().id(), before);
                        assert_eq!(own_name(), Some(format!("g{i}")));
                    }
                    // A thread that it starts is a thread.
                    let started = thread::Builder::new().name("started".into()).spawn(own_name);
                    assert_eq!(started.unwrap().join().unwrap().as_deref(), Some("started"));
                    before
                };
                Builder::new().name(format!("g{i}")).go(body).unwrap()
            })
            .collect::<Vec<_>>();
        let ids: HashSet<_> = join_all(goroutines).into_iter().collect();
        assert_eq!(ids.len(), 200);
    });
}

#[test]
fn a_named_goroutine_unparks_by_stds_handle() {
    trefoil::run(|| {
        let (send, handle) = trefoil::chan::bounded(1);
        let parked = Builder::new().name("parked").go(move || {
            send.send(thread::current()).unwrap();
            thread::park();
        });
        let handle: thread::Thread = handle.recv().unwrap();
        assert_eq!(handle.name(), Some("parked"));
        handle.unpark();
        parked.unwrap().join().unwrap();
    });
}
