//! What the server answers: one line in [`ROUTES`] for each path.

use crate::connection::Connection;
use crate::http::{Method, Request, Response, TEXT};
use crate::{openmetrics, state};
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use trefoil::debug;
use trefoil::observer::{self, RuntimeRef};
use trefoil::profile::{self, Cpu, Profile};
use trefoil::trace::{self, Recorder};

/// A path.
struct Route {
    method: Method,
    path: &'static str,
    /// What it is, for the index.
    about: &'static str,
    answer: fn(&Asked<'_>) -> Result<Response, Response>,
}

const fn get(
    path: &'static str,
    about: &'static str,
    answer: fn(&Asked<'_>) -> Result<Response, Response>,
) -> Route {
    Route { method: Method::Get, path, about, answer }
}

const fn post(
    path: &'static str,
    about: &'static str,
    answer: fn(&Asked<'_>) -> Result<Response, Response>,
) -> Route {
    Route { method: Method::Post, path, about, answer }
}

/// The folder of Go's profiles.
const PPROF: &str = "/debug/pprof/";

const ROUTES: &[Route] = &[
    get("/", "the page", page),
    get("/metrics", "counters and histograms for Prometheus", metrics),
    get(
        "/snapshot",
        "what the flight recorder has, for Perfetto; seconds=N records so long",
        snapshot,
    ),
    get("/api/state", "what the page shows, as JSON; waits=1: with who waits for whom", api_state),
    get("/api/stack", "the stack of the goroutine id=N", api_stack),
    post("/api/recorder", "begins (on=1) or ends (on=0) a recording", api_recorder),
    post("/api/rate", "samples waits for profile=block or mutex; nanos=0 ends it", api_rate),
    get(PPROF, "the list of profiles", pprof_index),
    get("/debug/pprof/cmdline", "the command line", cmdline),
    get(
        "/debug/pprof/goroutine",
        "all goroutines; debug=1: as text, debug=2: as a dump",
        goroutine,
    ),
    get(
        "/debug/pprof/profile",
        "CPU time for seconds=N, or 30; hz=N samples per second, or 100; debug=1: as text",
        cpu,
    ),
    get(
        "/debug/pprof/waits",
        "what goroutines wait for now, and how long; debug=1: as text",
        waits,
    ),
    get(
        "/debug/pprof/goroutineleak",
        "goroutines that wait for ever, certainly or probably; debug=1: as text",
        leaks,
    ),
    get("/debug/pprof/block", "where goroutines have waited; debug=1: as text", block),
    get("/debug/pprof/mutex", "who held locks that others waited for; debug=1: as text", mutex),
    get(
        "/debug/pprof/trace",
        "what the flight recorder has, for `trefoil trace`; seconds=N",
        trace,
    ),
];

/// The longest time for which a request may collect. Such requests need no token, so that
/// `go tool pprof URL` works: what a stranger on this machine can cost the program is bounded by
/// this time and by [`Kept::is_recording`].
const SECONDS_MAX: u64 = 120;
/// For how long a CPU profile is taken, and how many samples per second, as Go's.
const CPU_TIME: Duration = Duration::from_secs(30);
const CPU_HZ: u64 = 100;
/// How often such a request checks whether the client has hung up or the server stops.
const HANG_UP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The page's text has this where a value of its own must be for each answer.
const NONCE: &str = "{{nonce}}";
const PAGE: &str = include_str!("page.html");

/// What the server keeps between requests.
#[derive(Default)]
pub(crate) struct Kept {
    /// Recordings that were begun by request, by the number of their runtime.
    recorders: Mutex<HashMap<u64, Recorder>>,
    /// A request with `seconds` records. Others that ask for the same are refused meanwhile.
    is_recording: AtomicBool,
    /// The server stops: no request takes longer than it must.
    pub(crate) is_stopping: AtomicBool,
}

/// A request and what is known about it.
struct Asked<'a> {
    request: &'a Request,
    client: &'a Connection,
    kept: &'a Kept,
}

/// Returns the answer to a request that is allowed.
pub(crate) fn answer(request: &Request, client: &Connection, kept: &Kept) -> Response {
    let asked = Asked { request, client, kept };
    let wanted = if request.method == Method::Head { Method::Get } else { request.method };
    let mut at_path = ROUTES.iter().filter(|route| route.path == request.path).peekable();
    if at_path.peek().is_none() {
        if request.path == "/debug/pprof" {
            let response = Response::error(301, "the profiles are in /debug/pprof/");
            return response.with("Location", PPROF);
        }
        return Response::error(404, "there is nothing at this path");
    }
    match at_path.find(|route| route.method == wanted) {
        Some(route) => (route.answer)(&asked).unwrap_or_else(|refusal| refusal),
        None => Response::error(405, "this path needs another method"),
    }
}

/// Returns the names of the profiles.
fn profiles() -> impl Iterator<Item = &'static str> {
    let names = ROUTES.iter().filter_map(|route| route.path.strip_prefix(PPROF));
    names.filter(|name| !matches!(*name, "" | "cmdline"))
}

impl Asked<'_> {
    /// Returns the runtime with the number in the query, or the oldest one.
    fn runtime(&self) -> Result<RuntimeRef, Response> {
        let mut all = observer::runtimes().into_iter();
        match self.number("runtime")? {
            None => all.next().ok_or_else(|| Response::error(503, "no runtime is running")),
            Some(number) => all
                .find(|runtime| runtime.number() == number)
                .ok_or_else(|| Response::error(404, "there is no runtime with this number")),
        }
    }

    /// Returns a number of the query.
    fn number(&self, name: &str) -> Result<Option<u64>, Response> {
        let bad = |_| Response::error(400, format_args!("{name}: expected a number"));
        self.request.query(name).map(|value| value.parse().map_err(bad)).transpose()
    }

    /// Refuses `HEAD` for what is expensive: its answer would have no body.
    fn refuse_head(&self) -> Result<(), Response> {
        match self.request.method {
            Method::Head => Err(Response::error(405, "this is expensive to make: use GET")),
            _ => Ok(()),
        }
    }

    /// Must be called before an answer is made that may be large. Waits for a permit.
    fn allow_large_answer(&self) -> Result<(), Response> {
        self.refuse_head()?;
        self.request.allow_large_answer(self.client)
    }

    /// Waits while something is collected. Fails if the client hangs up or the server stops, so that
    /// another request can collect.
    fn collect_for(&self, time: Duration) -> Result<(), Response> {
        let end = Instant::now() + time;
        loop {
            if self.kept.is_stopping.load(Ordering::SeqCst) {
                return Err(Response::error(503, "the server stops"));
            }
            if self.client.has_hung_up() {
                return Err(Response::hung_up());
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            trefoil::time::sleep(left.min(HANG_UP_CHECK_INTERVAL));
        }
    }

    /// Refuses `seconds` for a profile that does not collect.
    fn refuse_seconds(&self, why: &str) -> Result<(), Response> {
        match self.request.query("seconds") {
            Some(_) => Err(Response::error(400, format_args!("seconds is not for this: {why}"))),
            None => Ok(()),
        }
    }

    /// Returns for how long the request collects.
    fn seconds(&self) -> Result<Option<Duration>, Response> {
        match self.number("seconds")? {
            Some(seconds @ 0..=SECONDS_MAX) => Ok(Some(Duration::from_secs(seconds))),
            None => Ok(None),
            Some(_) => Err(Response::error(400, format_args!("seconds: at most {SECONDS_MAX}"))),
        }
    }
}

fn page(_: &Asked<'_>) -> Result<Response, Response> {
    // Two hashes with random keys.
    let random = || RandomState::new().hash_one(std::process::id());
    let nonce = format!("{:016x}{:016x}", random(), random());
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; \
         connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'"
    );
    Ok(Response::new("text/html; charset=utf-8", PAGE.replace(NONCE, &nonce))
        .with("Content-Security-Policy", policy))
}

fn metrics(_: &Asked<'_>) -> Result<Response, Response> {
    Ok(Response::new(openmetrics::CONTENT_TYPE, openmetrics::text(&observer::runtimes())))
}

fn api_state(asked: &Asked<'_>) -> Result<Response, Response> {
    let runtime = asked.runtime()?;
    let groups = asked.number("groups")?.map_or(state::GROUPS_MAX, |n| n as usize);
    let waits = asked.number("waits")? == Some(1);
    if waits {
        // While the graph is made, it has an entry for each goroutine that waits.
        asked.allow_large_answer()?;
    }
    Ok(Response::new("application/json", state::state(&runtime, groups, waits, profiles())))
}

fn api_stack(asked: &Asked<'_>) -> Result<Response, Response> {
    let runtime = asked.runtime()?;
    let id = asked.number("id")?.ok_or_else(|| Response::error(400, "id is missing"))?;
    match runtime.observe(|| observer::stack(id)) {
        Some(text) => Ok(Response::new(TEXT, text)),
        None => Err(Response::error(404, "this goroutine has ended")),
    }
}

fn api_recorder(asked: &Asked<'_>) -> Result<Response, Response> {
    let runtime = asked.runtime()?;
    let mut recorders = asked.kept.recorders.lock().unwrap_or_else(PoisonError::into_inner);
    match asked.request.query("on") {
        Some("1") => {
            let recorder = runtime.observe(Recorder::start);
            let recorder = recorder.map_err(|e| Response::error(409, e))?;
            recorders.insert(runtime.number(), recorder);
            Ok(Response::new(TEXT, "recording\n"))
        }
        Some("0") => match recorders.remove(&runtime.number()) {
            Some(recorder) => {
                recorder.stop();
                Ok(Response::new(TEXT, "stopped\n"))
            }
            None => Err(Response::error(409, "no recording was begun by request")),
        },
        _ => Err(Response::error(400, "on: expected 0 or 1")),
    }
}

/// Sets how many waits the profiles `block` and `mutex` sample.
fn api_rate(asked: &Asked<'_>) -> Result<Response, Response> {
    let nanos = asked.number("nanos")?.ok_or_else(|| Response::error(400, "nanos is missing"))?;
    let rate = Duration::from_nanos(nanos);
    let set = match asked.request.query("profile") {
        Some("block") => profile::set_block_rate(rate),
        Some("mutex") => profile::set_mutex_rate(rate),
        _ => return Err(Response::error(400, "profile: expected block or mutex")),
    };
    set.map_err(|e| Response::error(500, e))?;
    Ok(Response::new(TEXT, if nanos == 0 { "stopped\n" } else { "sampling\n" }))
}

/// The right to record for a request: only one at a time has it.
struct Turn<'a>(&'a AtomicBool);

impl<'a> Turn<'a> {
    fn take(is_recording: &'a AtomicBool) -> Result<Self, Response> {
        if is_recording.swap(true, Ordering::Acquire) {
            let text = "another request records at the moment: ask again later";
            return Err(Response::error(409, text).with("Retry-After", "1"));
        }
        Ok(Self(is_recording))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Returns what the flight recorder has. With `seconds`, waits so long before; if nothing is being
/// recorded, it is recorded for that time.
fn recorded(asked: &Asked<'_>) -> Result<trace::Snapshot, Response> {
    let (runtime, seconds) = (asked.runtime()?, asked.seconds()?);
    let snapshot = match seconds {
        None => {
            asked.allow_large_answer()?;
            runtime.observe(trace::snapshot)
        }
        Some(time) => {
            asked.refuse_head()?;
            let _turn = Turn::take(&asked.kept.is_recording)?;
            // Fails if the program records already; then that recording is used.
            let _recorder = runtime.observe(Recorder::start).ok();
            asked.collect_for(time)?;
            asked.allow_large_answer()?;
            runtime.observe(trace::snapshot)
        }
    };
    snapshot.ok_or_else(|| {
        let text = "nothing was recorded: ask for ?seconds=N, or start the program with \
                    TREFOIL_TRACE=on";
        Response::error(404, text)
    })
}

const BYTES: &str = "application/octet-stream";

fn snapshot(asked: &Asked<'_>) -> Result<Response, Response> {
    let snapshot = recorded(asked)?;
    let mut file = Vec::new();
    snapshot.write_perfetto(&mut file).map_err(|e| Response::error(500, e))?;
    Ok(Response::new(BYTES, file).saved_as("trefoil.perfetto-trace"))
}

fn trace(asked: &Asked<'_>) -> Result<Response, Response> {
    let snapshot = recorded(asked)?;
    let mut file = Vec::new();
    snapshot.write(&mut file).map_err(|e| Response::error(500, e))?;
    Ok(Response::new(BYTES, file).saved_as("trefoil.trace"))
}

/// Returns a profile in pprof's format, or with `debug` as text that begins with `about`.
fn profile_response(
    asked: &Asked<'_>,
    name: &str,
    about: &str,
    profile: &Profile,
) -> Result<Response, Response> {
    if asked.number("debug")?.unwrap_or(0) != 0 {
        return Ok(Response::new(TEXT, format!("{about}{}", profile.text())));
    }
    let mut file = Vec::new();
    profile.write_pprof(&mut file).map_err(|e| Response::error(500, e))?;
    Ok(Response::new(BYTES, file).saved_as(&format!("{name}.pb")))
}

/// Profiles CPU time. The profile is of the whole process: the server's own runtime is in it too.
fn cpu(asked: &Asked<'_>) -> Result<Response, Response> {
    asked.refuse_head()?;
    let time = asked.seconds()?.unwrap_or(CPU_TIME);
    let hz = asked.number("hz")?.unwrap_or(CPU_HZ);
    let hz = u32::try_from(hz).unwrap_or(u32::MAX);
    // Checked before the time passes.
    asked.number("debug")?;
    let profiling = Cpu::start(hz).map_err(|e| match e {
        profile::Error::InvalidRate => Response::error(400, e),
        profile::Error::Os(_) => Response::error(500, e),
        _ => Response::error(409, e),
    })?;
    asked.collect_for(time)?;
    asked.allow_large_answer()?;
    profile_response(asked, "profile", "", &profiling.stop())
}

fn waits(asked: &Asked<'_>) -> Result<Response, Response> {
    present(asked, "waits", profile::waits)
}

fn leaks(asked: &Asked<'_>) -> Result<Response, Response> {
    present(asked, "leaks", profile::leaks)
}

/// Takes a profile of the present moment.
fn present(asked: &Asked<'_>, name: &str, take: fn() -> Profile) -> Result<Response, Response> {
    asked.refuse_seconds("it is about the present moment")?;
    asked.allow_large_answer()?;
    profile_response(asked, name, "", &asked.runtime()?.observe(take))
}

fn block(asked: &Asked<'_>) -> Result<Response, Response> {
    sampled(asked, "block", &profile::block)
}

fn mutex(asked: &Asked<'_>) -> Result<Response, Response> {
    sampled(asked, "mutex", &profile::mutex)
}

/// Returns a profile that counts only after the program, or a request, has asked for it.
fn sampled(
    asked: &Asked<'_>,
    name: &str,
    take: &dyn Fn() -> Profile,
) -> Result<Response, Response> {
    asked.refuse_seconds("it counts since its rate was set")?;
    asked.allow_large_answer()?;
    let about = format!(
        "# Waits are counted after the program has called profile::set_{name}_rate, or a request \
         has set\n# the rate: POST /api/rate?profile={name}&nanos=10000, with the token. A rate of \
         0 ends it.\n"
    );
    profile_response(asked, name, &about, &take())
}

fn goroutine(asked: &Asked<'_>) -> Result<Response, Response> {
    let runtime = asked.runtime()?;
    asked.allow_large_answer()?;
    match asked.number("debug")?.unwrap_or(0) {
        0 => profile_response(asked, "goroutine", "", &runtime.observe(debug::profile)),
        1 => {
            let profile = runtime.observe(debug::profile);
            let mut text = format!("goroutine profile: total {}\n", profile.goroutines());
            let mut stacks: Vec<(u64, String)> = Vec::new();
            for line in profile.folded().lines() {
                let (frames, count) = line.rsplit_once(' ').unwrap_or((line, "0"));
                let frames = frames.split(';').rev().map(|frame| format!("#\t{frame}\n"));
                stacks.push((count.parse().unwrap_or(0), frames.collect()));
            }
            stacks.sort_by(|a, b| b.cmp(a));
            for (count, frames) in stacks {
                text.push_str(&format!("{count} @\n{frames}\n"));
            }
            Ok(Response::new(TEXT, text))
        }
        _ => Ok(Response::new(TEXT, runtime.observe(debug::dump))),
    }
}

fn cmdline(_: &Asked<'_>) -> Result<Response, Response> {
    let words: Vec<String> =
        std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    Ok(Response::new(TEXT, words.join("\0")))
}

fn pprof_index(_: &Asked<'_>) -> Result<Response, Response> {
    let mut rows = String::new();
    for route in ROUTES.iter().filter(|route| route.path.starts_with(PPROF)) {
        if let Some(name) = route.path.strip_prefix(PPROF).filter(|name| !name.is_empty()) {
            rows.push_str(&format!("<li><a href=\"{name}\">{name}</a>: {}</li>\n", route.about));
        }
    }
    let html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><title>{PPROF}</title>\n<h1>Profiles</h1>\n\
         <ul>\n{rows}</ul>\n<p><a href=\"goroutine?debug=2\">full goroutine dump</a></p></html>\n"
    );
    Ok(Response::new("text/html; charset=utf-8", html)
        .with("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_routes_are_alike() {
        for (i, route) in ROUTES.iter().enumerate() {
            let same = |other: &Route| other.path == route.path && other.method == route.method;
            assert!(!ROUTES[i + 1..].iter().any(same), "{}", route.path);
            assert!(!route.about.is_empty());
        }
    }

    #[test]
    fn the_page_names_no_other_site() {
        assert_eq!(PAGE.matches(NONCE).count(), 2, "one script, one style");
        for word in ["http:", "https:", "src=", "@import", "url(", "<link"] {
            assert!(!PAGE.contains(word), "the page has {word:?}");
        }
    }
}
