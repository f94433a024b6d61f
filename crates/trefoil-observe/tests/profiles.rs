//! The profiles under `/debug/pprof/`, also by `go tool pprof`, and who waits for whom in the
//! state.

mod common;

use common::json::Json;
use common::{ask, get, pprof, settings, until, with_server};
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use trefoil::sync::{Barrier, Mutex};
use trefoil::time::sleep;

#[inline(never)]
fn spins_in_here(until: &AtomicBool) {
    while !until.load(Ordering::Relaxed) {
        std::hint::black_box((0..1000_u64).map(std::hint::black_box).sum::<u64>());
    }
}

/// Calls `f` while a goroutine computes.
fn while_one_spins(f: impl FnOnce()) {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let spinner =
        trefoil::labels!("user" => "ann"; || trefoil::go(move || spins_in_here(&stopped)));
    f();
    stop.store(true, Ordering::Relaxed);
    spinner.join().unwrap();
}

fn post(address: SocketAddr, target: &str, more: &str) -> u16 {
    ask(address, &format!("POST {target} HTTP/1.1\r\nHost: {address}\r\n{more}\r\n")).status
}

#[test]
fn a_cpu_profile_names_who_computes() {
    with_server(settings(), |address| {
        while_one_spins(|| {
            until("the spinner is not in the profile", || {
                let text = get(address, "/debug/pprof/profile?seconds=1&debug=1");
                assert_eq!(text.status, 200, "{text:?}");
                let text = text.text();
                (text.contains("spins_in_here") && text.contains("\"user\":\"ann\"")).then_some(())
            });
            let file = get(address, "/debug/pprof/profile?seconds=1&hz=200");
            assert_eq!(file.status, 200);
            pprof::check(&file.body);
            assert!(file.header("content-disposition").unwrap().contains("profile.pb"));
        });
        assert_eq!(get(address, "/debug/pprof/profile?seconds=121").status, 400);
        assert_eq!(get(address, "/debug/pprof/profile?seconds=1&hz=0").status, 400);
        assert_eq!(get(address, "/debug/pprof/profile?seconds=1&debug=x").status, 400);
    });
}

#[test]
fn a_second_cpu_profile_is_refused() {
    with_server(settings(), |address| {
        let other = trefoil::profile::Cpu::start(100).unwrap();
        let refused = get(address, "/debug/pprof/profile?seconds=1");
        assert_eq!(refused.status, 409);
        assert_eq!(refused.text(), "a CPU profile is being taken already\n");
        drop(other);
        assert_eq!(get(address, "/debug/pprof/profile?seconds=0").status, 200);
    });
}

#[test]
fn the_waits_of_now_have_their_place() {
    with_server(settings(), |address| {
        #[inline(never)]
        fn waits_in_here(rx: &trefoil::chan::Receiver<()>) {
            _ = rx.recv();
            std::hint::black_box(());
        }
        let (tx, rx) = trefoil::chan::bounded::<()>(0);
        trefoil::go(move || waits_in_here(&rx));
        until("the goroutine is not in the profile", || {
            let text = get(address, "/debug/pprof/waits?debug=1");
            text.text().contains("waits_in_here").then_some(())
        });
        pprof::check(&get(address, "/debug/pprof/waits").body);
        assert_eq!(get(address, "/debug/pprof/waits?seconds=1").status, 400);
        drop(tx);
    });
}

#[test]
fn block_and_mutex_count_after_their_rate_was_set() {
    static M: Mutex<()> = Mutex::new(());
    #[inline(never)]
    fn locks_in_here() {
        drop(M.lock());
        std::hint::black_box(());
    }
    #[inline(never)]
    fn unlocks_in_here() {
        let guard = M.lock();
        sleep(Duration::from_millis(50));
        drop(guard);
        std::hint::black_box(());
    }
    fn contend() {
        let holder = trefoil::go(unlocks_in_here);
        sleep(Duration::from_millis(10));
        let waiter = trefoil::go(locks_in_here);
        holder.join().unwrap();
        waiter.join().unwrap();
    }
    with_server(settings(), |address| {
        for name in ["block", "mutex"] {
            let text = get(address, &format!("/debug/pprof/{name}?debug=1"));
            assert!(text.text().contains(&format!("profile::set_{name}_rate")), "{text:?}");
            pprof::check(&get(address, &format!("/debug/pprof/{name}")).body);
            assert_eq!(get(address, &format!("/debug/pprof/{name}?seconds=1")).status, 400);
            assert_eq!(post(address, &format!("/api/rate?profile={name}&nanos=1"), ""), 403);
        }
    });
    with_server(settings().token("t0ken"), |address| {
        let token = "Authorization: Bearer t0ken\r\n";
        assert_eq!(post(address, "/api/rate?profile=block&nanos=1", ""), 401);
        assert_eq!(post(address, "/api/rate?profile=cpu&nanos=1", token), 400);
        assert_eq!(post(address, "/api/rate?profile=block", token), 400);
        for name in ["block", "mutex"] {
            assert_eq!(post(address, &format!("/api/rate?profile={name}&nanos=1"), token), 200);
        }
        for (name, function) in [("block", "locks_in_here"), ("mutex", "unlocks_in_here")] {
            until(&format!("{function} is not in {name}"), || {
                contend();
                let target = format!("/debug/pprof/{name}?debug=1");
                let request = format!("GET {target} HTTP/1.1\r\nHost: {address}\r\n{token}\r\n");
                ask(address, &request).text().contains(function).then_some(())
            });
            assert_eq!(post(address, &format!("/api/rate?profile={name}&nanos=0"), token), 200);
        }
    });
}

fn waits(address: SocketAddr) -> Json {
    Json::parse(get(address, "/api/state?waits=1").text())
}

#[test]
fn who_waits_for_whom_is_told_if_asked() {
    static M: Mutex<()> = Mutex::new(());
    with_server(settings(), |address| {
        let guard = M.lock();
        let waiter = trefoil::go(|| drop(M.lock()));
        let state = until("the waiter is not listed", || {
            let state = waits(address);
            (!state.get("waits").list().is_empty()).then_some(state)
        });
        let wait = &state.get("waits").list()[0];
        assert_eq!(wait.get("id").number(), waiter.id());
        assert_eq!(wait.get("holders").list()[0].number(), trefoil::id());
        assert!(wait.get("text").string().starts_with("waits for Mutex 0x"), "{wait:?}");
        assert_eq!(state.get("waits_total").number(), 1);
        assert!(state.get("deadlocks").list().is_empty());
        let without = Json::parse(get(address, "/api/state").text());
        assert_eq!(*without.get("waits"), Json::Null);
        assert_eq!(*without.get("deadlocks"), Json::Null);
        drop(guard);
        waiter.join().unwrap();
    });
}

#[test]
fn a_certain_deadlock_is_told_in_words() {
    static A: Mutex<()> = Mutex::new(());
    static B: Mutex<()> = Mutex::new(());
    with_server(settings(), |address| {
        let both = Arc::new(Barrier::new(2));
        let stuck = |first: &'static Mutex<()>, second: &'static Mutex<()>| {
            let both = both.clone();
            let stuck = trefoil::go(move || {
                let _first = first.lock();
                // Each holds its first mutex.
                both.wait();
                drop(second.lock());
            });
            stuck.id()
        };
        let mut ids = [stuck(&A, &B), stuck(&B, &A)];
        let state = until("the deadlock is not found", || {
            let state = waits(address);
            let certain = |d: &&Json| *d.get("certain") == Json::Bool(true);
            let found = state.get("deadlocks").list().iter().find(certain).cloned();
            found.map(|deadlock| (deadlock, state))
        });
        let (deadlock, state) = state;
        let text = deadlock.get("text").string();
        assert!(text.starts_with("deadlock (certain): 2 goroutines wait for each other"), "{text}");
        let mut members: Vec<u64> =
            deadlock.get("members").list().iter().map(Json::number).collect();
        members.sort_unstable();
        ids.sort_unstable();
        assert_eq!(members, ids);
        assert_eq!(state.get("waits").list().len(), 2);
    });
}

#[test]
fn who_uses_the_cpus_is_told() {
    with_server(settings(), |address| {
        while_one_spins(|| {
            let user = until("the spinner is not listed", || {
                let state = Json::parse(get(address, "/api/state").text());
                let much = |used: &&Json| used.get("running_us").number() > 50_000;
                state.get("usage").list().iter().find(much).cloned().filter(|used| {
                    used.get("labels").list().iter().any(|label| label.string() == "user=ann")
                })
            });
            assert!(user.get("function").string().contains("while_one_spins"), "{user:?}");
            assert!(user.get("who").string().starts_with("goroutine "), "{user:?}");
        });
    });
}

/// Returns Go's command, if there is one: `$TREFOIL_GO`, or that in the path.
fn go() -> Option<PathBuf> {
    let named = std::env::var_os("TREFOIL_GO").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).map(|folder| folder.join("go"));
    named.into_iter().chain(in_path).find(|file| file.is_file())
}

/// The URLs are as `go tool pprof` gets them from people.
#[test]
fn go_tool_pprof_reads_the_profiles() {
    let Some(go) = go() else {
        // Past libtest's capture.
        let _ = writeln!(
            std::io::stderr(),
            "skipped: go tool pprof: Go is not available (PATH, TREFOIL_GO)"
        );
        return;
    };
    let folder = std::env::temp_dir().join(format!("trefoil-pprof-{}", std::process::id()));
    let top = |url: String| {
        let output = Command::new(&go)
            .args(["tool", "pprof", "-top", "-nodecount=50", &url])
            .env("PPROF_TMPDIR", &folder)
            .output()
            .unwrap();
        let (out, err) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{url}: {out}{err}");
        out.into_owned()
    };
    with_server(settings(), |address| {
        while_one_spins(|| {
            until("the spinner is not in pprof's list", || {
                let text = top(format!("http://{address}/debug/pprof/profile?seconds=1"));
                assert!(text.contains("Type: cpu"), "{text}");
                text.contains("spins_in_here").then_some(())
            });
            for name in ["goroutine", "waits", "block", "mutex"] {
                let text = top(format!("http://{address}/debug/pprof/{name}"));
                assert!(text.contains("Type: "), "{text}");
            }
        });
    });
    _ = std::fs::remove_dir_all(&folder);
}
