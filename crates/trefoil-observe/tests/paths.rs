//! What each path answers.

mod common;

use common::json::Json;
use common::{
    WithBody, alone, ask, connect, get, openmetrics, pprof, read_answer, settings, until,
    with_server,
};
use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use trefoil::chan::bounded;
use trefoil::time::sleep;

fn state(address: SocketAddr) -> Json {
    let answer = get(address, "/api/state");
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/json"));
    Json::parse(answer.text())
}

/// Starts goroutines that wait until the result is dropped.
fn wait_in_goroutines(n: usize) -> trefoil::chan::Sender<()> {
    let (tx, rx) = bounded::<()>(0);
    for _ in 0..n {
        let rx = rx.clone();
        trefoil::go(move || rx.recv());
    }
    tx
}

/// Returns the group of [`wait_in_goroutines`] when all of its `n` goroutines wait.
fn waiting_group(address: SocketAddr, n: u64) -> Json {
    until("the goroutines do not wait", || {
        let state = state(address);
        let is_it = |group: &&Json| {
            group.get("function").string() == "paths::wait_in_goroutines"
                && group.get("state").string() == "chan receive"
        };
        let found = state.get("groups").list().iter().find(is_it).cloned();
        found.filter(|group| group.get("count").number() == n)
    })
}

#[test]
fn the_state_has_groups_and_numbers() {
    with_server(settings(), |address| {
        let keep = wait_in_goroutines(300);
        let group = waiting_group(address, 300);
        assert_eq!(group.get("kind").string(), "goroutine");
        assert!(group.get("place").string().contains("tests/paths.rs:"));
        let old = until("the age does not grow", || {
            Some(waiting_group(address, 300)).filter(|g| g.get("mean_ms").number() >= 20)
        });
        assert!(old.get("oldest_ms").number() >= old.get("mean_ms").number());
        let state = state(address);
        assert_eq!(state.get("version").number(), 1);
        assert_eq!(state.get("pid").number(), u64::from(std::process::id()));
        // Main and the others: the server's goroutines are not among them.
        assert_eq!(state.get("goroutines").number(), 301);
        assert_eq!(trefoil::num_goroutines(), 301);
        assert_eq!(state.get("ps").list().len(), trefoil::debug::stats().procs.len());
        for name in ["scheduling", "timers", "poll", "kernel"] {
            assert_eq!(state.get("latency").get(name).get("buckets").list().len(), 40);
        }
        let profiles = state.get("profiles").list();
        assert!(profiles.iter().any(|name| name.string() == "goroutine"));
        drop(keep);
    });
}

#[test]
fn tasks_are_groups_too() {
    with_server(settings(), |address| {
        let (_tx, rx) = bounded::<()>(0);
        for _ in 0..20 {
            let rx = rx.clone();
            trefoil::task::spawn(async move { rx.recv_async().await });
        }
        until("20 tasks wait", || {
            let state = state(address);
            let is_it = |group: &&Json| {
                group.get("kind").string() == "task" && group.get("count").number() == 20
            };
            state.get("groups").list().iter().find(is_it).cloned()
        });
        assert_eq!(state(address).get("tasks").number(), 20);
    });
}

#[test]
fn the_number_of_groups_is_limited_as_asked() {
    with_server(settings(), |address| {
        let _keep = wait_in_goroutines(3);
        waiting_group(address, 3);
        let one = Json::parse(get(address, "/api/state?groups=1").text());
        assert_eq!(one.get("groups").list().len(), 1);
        assert!(one.get("groups_total").number() >= 2);
    });
}

#[test]
fn a_stack_shows_where_a_goroutine_waits() {
    with_server(settings(), |address| {
        let _keep = wait_in_goroutines(5);
        let example = waiting_group(address, 5).get("example").number();
        let answer = get(address, &format!("/api/stack?id={example}"));
        assert_eq!(answer.status, 200);
        assert!(answer.text().contains("recv"), "{}", answer.text());
        assert!(
            answer.text().contains("created by paths::wait_in_goroutines"),
            "{}",
            answer.text()
        );
        assert_eq!(get(address, "/api/stack?id=999999999").status, 404);
        assert_eq!(get(address, "/api/stack?id=x").status, 400);
        assert_eq!(get(address, "/api/stack").status, 400);
    });
}

#[test]
fn metrics_are_openmetrics() {
    with_server(settings(), |address| {
        let _keep = wait_in_goroutines(7);
        waiting_group(address, 7);
        (0..5).for_each(|_| sleep(Duration::from_millis(1)));
        let answer = get(address, "/metrics");
        assert_eq!(
            answer.header("content-type"),
            Some("application/openmetrics-text; version=1.0.0; charset=utf-8")
        );
        let families = openmetrics::parse(answer.text());
        assert_eq!(families["trefoil_goroutines"].samples[0].2, 8.0);
        let states = &families["trefoil_goroutines_by_state"].samples;
        let receiving = |labels: &[(String, String)]| {
            labels.iter().any(|(name, value)| name == "state" && value == "chan receive")
        };
        assert!(states.iter().any(|(_, labels, value)| receiving(labels) && *value >= 7.0));
        let late = &families["trefoil_timers_latency_seconds"];
        assert_eq!((late.kind.as_str(), late.unit.as_str()), ("histogram", "seconds"));
        let count = late.samples.iter().find(|(name, ..)| name.ends_with("_count")).unwrap();
        // A sleep that begins after its due time needs no timer.
        assert!(count.2 >= 1.0);
        assert_eq!(families["trefoil_p_slices"].kind, "counter");
        assert_eq!(families.values().filter(|f| f.kind == "histogram").count(), 4);
    });
}

#[test]
fn goroutine_profiles_have_the_forms_of_go() {
    with_server(settings(), |address| {
        let _keep = wait_in_goroutines(9);
        waiting_group(address, 9);
        let profile = get(address, "/debug/pprof/goroutine?debug=0");
        assert_eq!(profile.header("content-type"), Some("application/octet-stream"));
        pprof::check(&profile.body);
        pprof::check(&get(address, "/debug/pprof/goroutine").body);
        let text = get(address, "/debug/pprof/goroutine?debug=1");
        assert!(
            text.text().starts_with("goroutine profile: total 10\n9 @\n#\t"),
            "{}",
            text.text()
        );
        let dump = get(address, "/debug/pprof/goroutine?debug=2");
        assert_eq!(dump.text().matches("[chan receive]:").count(), 9, "{}", dump.text());
        assert!(!dump.text().contains("trefoil_observe"), "{}", dump.text());
        assert_eq!(get(address, "/debug/pprof/goroutine?debug=x").status, 400);
        let index = get(address, "/debug/pprof/");
        assert!(index.text().contains("<a href=\"goroutine\">"));
        assert!(get(address, "/debug/pprof/cmdline").text().contains("paths"));
    });
}

#[test]
fn a_snapshot_needs_a_recording_or_a_time() {
    with_server(settings(), |address| {
        assert_eq!(get(address, "/snapshot").status, 404);
        assert_eq!(get(address, "/debug/pprof/trace").status, 404);
        assert_eq!(get(address, "/snapshot?seconds=121").status, 400);
        let has_ended = Arc::new(AtomicBool::new(false));
        let flag = has_ended.clone();
        let working = trefoil::go(move || {
            while !flag.load(Ordering::Relaxed) {
                sleep(Duration::from_millis(1));
            }
        });
        let perfetto = get(address, "/snapshot?seconds=0");
        assert_eq!(perfetto.status, 200);
        assert!(perfetto.header("content-disposition").unwrap().contains(".perfetto-trace"));
        let file = get(address, "/debug/pprof/trace?seconds=1");
        assert_eq!(file.status, 200);
        let snapshot = trefoil::trace::Snapshot::read(&file.body[..]).unwrap();
        let id = working.id();
        has_ended.store(true, Ordering::Relaxed);
        working.join().unwrap();
        assert!(snapshot.goroutines().contains(&id), "{:?}", snapshot.goroutines());
        assert_eq!(*state(address).get("recording"), Json::Bool(false));
        // What was recorded stays.
        assert_eq!(get(address, "/snapshot").status, 200);
    });
}

#[test]
fn one_request_records_at_a_time() {
    with_server(settings(), |address| {
        for target in ["/snapshot?seconds=100", "/debug/pprof/profile"] {
            let head = ask(address, &format!("HEAD {target} HTTP/1.1\r\nHost: {address}\r\n\r\n"));
            assert_eq!(head.status, 405, "{target}");
        }
        assert_eq!(*state(address).get("recording"), Json::Bool(false));
        let first = trefoil::go(move || get(address, "/debug/pprof/trace?seconds=1").status);
        until("nothing is being recorded", || {
            (*state(address).get("recording") == Json::Bool(true)).then_some(())
        });
        assert_eq!(get(address, "/snapshot?seconds=100").status, 409);
        assert_eq!(first.join().unwrap(), 200, "the first request was not disturbed");
        assert_eq!(get(address, "/snapshot?seconds=0").status, 200);
    });
}

#[test]
fn a_recording_of_the_program_is_used() {
    with_server(settings(), |address| {
        let recorder = trefoil::trace::Recorder::start().unwrap();
        assert_eq!(*state(address).get("recording"), Json::Bool(true));
        assert_eq!(get(address, "/snapshot?seconds=0").status, 200);
        assert_eq!(*state(address).get("recording"), Json::Bool(true));
        recorder.stop();
    });
}

#[test]
fn a_recording_by_request_needs_the_token() {
    let post = |address, target: &str, more: &str| {
        ask(address, &format!("POST {target} HTTP/1.1\r\nHost: {address}\r\n{more}\r\n")).status
    };
    with_server(settings(), |address| {
        assert_eq!(post(address, "/api/recorder?on=1", ""), 403);
        assert_eq!(*state(address).get("recording"), Json::Bool(false));
    });
    with_server(settings().token("t0ken"), |address| {
        let token = "Authorization: Bearer t0ken\r\n";
        assert_eq!(post(address, "/api/recorder?on=1", ""), 401);
        assert_eq!(post(address, "/api/recorder?on=1", token), 200);
        assert_eq!(post(address, "/api/recorder?on=1", token), 409);
        assert_eq!(post(address, "/api/recorder?on=2", token), 400);
        let request = format!("GET /snapshot HTTP/1.1\r\nHost: {address}\r\n{token}\r\n");
        assert_eq!(ask(address, &request).status, 200);
        assert_eq!(post(address, "/api/recorder?on=0", token), 200);
        assert_eq!(post(address, "/api/recorder?on=0", token), 409);
        assert_eq!(get(address, "/api/state").status, 401);
    });
}

#[test]
fn the_page_may_load_nothing_from_elsewhere() {
    with_server(settings(), |address| {
        let page = get(address, "/");
        assert_eq!(page.header("content-type"), Some("text/html; charset=utf-8"));
        let policy = page.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'nonce-"), "{policy}");
        let nonce = policy.split('\'').find(|part| part.starts_with("nonce-")).unwrap();
        let nonce = nonce.strip_prefix("nonce-").unwrap();
        assert_eq!(page.text().matches(nonce).count(), 2);
        assert!(!policy.contains("unsafe"));
        let again = get(address, "/");
        assert_ne!(again.header("content-security-policy"), Some(policy), "the nonce is used once");
        for name in
            ["cache-control", "x-content-type-options", "x-frame-options", "referrer-policy"]
        {
            assert!(page.header(name).is_some(), "{name}");
        }
    });
}

#[test]
fn methods_and_unknown_paths_are_answered() {
    with_server(settings(), |address| {
        assert_eq!(get(address, "/nothing").status, 404);
        assert_eq!(get(address, "/../etc/passwd").status, 404);
        assert_eq!(get(address, "/api/recorder?on=1").status, 405);
        let moved = get(address, "/debug/pprof");
        assert_eq!((moved.status, moved.header("location")), (301, Some("/debug/pprof/")));
        let head = ask(address, &format!("HEAD / HTTP/1.1\r\nHost: {address}\r\n\r\n"));
        assert_eq!(head.status, 200);
        assert!(head.header("content-length").unwrap().parse::<usize>().unwrap() > 10_000);
        let put = ask(address, &format!("PUT / HTTP/1.1\r\nHost: {address}\r\n\r\n"));
        assert_eq!(put.status, 501);
    });
}

#[test]
fn a_connection_serves_many_requests() {
    with_server(settings(), |address| {
        let mut stream = connect(address);
        for path in ["/metrics", "/nothing", "/api/state"] {
            write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
            let answer = read_answer(&mut stream, WithBody::Yes).unwrap();
            assert_eq!(answer.status, if path == "/nothing" { 404 } else { 200 });
        }
        // All at once.
        let requests = format!("GET /nothing HTTP/1.1\r\nHost: {address}\r\n\r\n").repeat(20);
        stream.write_all(requests.as_bytes()).unwrap();
        for _ in 0..20 {
            assert_eq!(read_answer(&mut stream, WithBody::Yes).unwrap().status, 404);
        }
        write!(stream, "GET / HTTP/1.0\r\nHost: {address}\r\n\r\n").unwrap();
        assert_eq!(read_answer(&mut stream, WithBody::Yes).unwrap().status, 200);
        assert!(read_answer(&mut stream, WithBody::Yes).is_none(), "1.0 ends the connection");
    });
}

#[test]
fn a_program_may_have_several_runtimes() {
    let _alone = alone();
    let (first, second) = (trefoil::Runtime::builder(), trefoil::Runtime::builder());
    let (first, second) = (first.procs(2).build().unwrap(), second.procs(3).build().unwrap());
    let server = trefoil_observe::start("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let numbers: Vec<u64> =
        state(address).get("runtimes").list().iter().map(Json::number).collect();
    assert_eq!(numbers.len(), 2);
    for (number, ps) in numbers.iter().zip([2, 3]) {
        let state = Json::parse(get(address, &format!("/api/state?runtime={number}")).text());
        assert_eq!((state.get("runtime").number(), state.get("ps").list().len()), (*number, ps));
    }
    assert_eq!(get(address, "/api/state?runtime=999999").status, 404);
    let families = openmetrics::parse(get(address, "/metrics").text());
    assert_eq!(families["trefoil_goroutines"].samples.len(), 2);
    drop((first, second));
    assert_eq!(get(address, "/api/state").status, 503);
    openmetrics::parse(get(address, "/metrics").text());
    server.stop();
}
