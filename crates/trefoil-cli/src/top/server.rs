//! The server of a process (`trefoil-observe`): a view from `/api/state`, a stack from
//! `/api/stack`.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tinyjson::JsonValue;

use super::view::{Group, P, User, View};

/// How long a server may take for an answer: on a busy machine its first one takes seconds, because
/// it reads the program's debug information.
const TIME: Duration = Duration::from_secs(10);
/// Bytes of an answer that are read at most.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// Levels of an answer that are read at most.
const DEPTH_MAX: u32 = 64;
/// The version of the format that this command understands.
const VERSION: u64 = 1;

/// Where a server listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Address {
    Socket(PathBuf),
    /// A name or address, with the port.
    Tcp(String),
}

impl Address {
    /// Parses `http://HOST:PORT/`, or `HOST:PORT`. None if it is something else.
    pub(super) fn parse(text: &str) -> Option<Address> {
        let url = text.strip_prefix("http://");
        let host = url.unwrap_or(text).split('/').next().filter(|host| !host.is_empty())?;
        let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        if url.is_none() && !has_port {
            return None;
        }
        Some(Address::Tcp(if has_port { host.to_owned() } else { format!("{host}:80") }))
    }

    /// Returns the socket of a process, if it has one.
    pub(super) fn of_process(pid: u32) -> Option<Address> {
        let uid = fs::metadata(format!("/proc/{pid}")).ok()?.uid();
        let runtime_dir =
            std::env::var_os("XDG_RUNTIME_DIR").map(|dir| Path::new(&dir).join("trefoil"));
        let folders = [
            runtime_dir,
            Some(format!("/run/user/{uid}/trefoil").into()),
            Some(format!("/tmp/trefoil-{uid}").into()),
        ];
        // Another user may have made the folder in /tmp.
        let is_own =
            |folder: &PathBuf| fs::symlink_metadata(folder).is_ok_and(|found| found.uid() == uid);
        let paths = folders.into_iter().flatten().filter(is_own);
        let mut sockets = paths.map(|folder| folder.join(format!("{pid}.sock")));
        sockets.find(|path| path.exists()).map(Address::Socket)
    }

    fn text(&self) -> String {
        match self {
            Address::Socket(path) => path.display().to_string(),
            Address::Tcp(host) => format!("http://{host}"),
        }
    }

    /// Returns the state of a runtime, or of the first one.
    pub(super) fn view(&self, runtime: Option<u64>) -> Result<View, String> {
        let runtime = runtime.map(|n| format!("&runtime={n}")).unwrap_or_default();
        let text = self.get(&format!("/api/state?waits=1{runtime}"))?;
        let state = parse_json(&text)
            .map_err(|e| format!("{}: not the answer of a trefoil server: {e}", self.text()))?;
        let state = Json(&state);
        if state.get("version").number() != Some(VERSION) {
            return Err(format!("{}: its trefoil-observe is of another version", self.text()));
        }
        Ok(parse(state, self.text()))
    }

    /// Returns the stack of a goroutine as text.
    pub(super) fn stack(&self, runtime: u64, id: u64) -> Result<String, String> {
        self.get(&format!("/api/stack?id={id}&runtime={runtime}"))
    }

    fn get(&self, target: &str) -> Result<String, String> {
        let named = |e: io::Error| format!("{}: {e}", self.text());
        let (status, body) = match self {
            Address::Socket(path) => {
                let stream = UnixStream::connect(path).map_err(named)?;
                stream.set_read_timeout(Some(TIME)).map_err(named)?;
                stream.set_write_timeout(Some(TIME)).map_err(named)?;
                exchange(stream, "localhost", target)
            }
            Address::Tcp(host) => {
                let found: Vec<SocketAddr> = host.to_socket_addrs().map_err(named)?.collect();
                let address = found.first().ok_or_else(|| format!("{host}: no such host"))?;
                let stream = TcpStream::connect_timeout(address, TIME).map_err(named)?;
                stream.set_read_timeout(Some(TIME)).map_err(named)?;
                stream.set_write_timeout(Some(TIME)).map_err(named)?;
                exchange(stream, host, target)
            }
        }
        .map_err(|e| match e.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                format!("{}: no answer within {} s", self.text(), TIME.as_secs())
            }
            _ => named(e),
        })?;
        match status {
            200 => Ok(body),
            401 => Err(format!("{}: it needs a token: set TREFOIL_OBSERVE_TOKEN", self.text())),
            _ => Err(format!("{}: {}", self.text(), body.trim())),
        }
    }
}

/// Sends a request, and returns the status and the body.
fn exchange(mut stream: impl Read + Write, host: &str, target: &str) -> io::Result<(u16, String)> {
    let token = std::env::var("TREFOIL_OBSERVE_TOKEN").ok().filter(|token| !token.is_empty());
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    let request =
        format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n{token}Connection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut bytes = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut bytes)?;
    let answer = String::from_utf8_lossy(&bytes);
    let not_http = || io::Error::new(io::ErrorKind::InvalidData, "no HTTP answer");
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(not_http)?;
    let status = head.strip_prefix("HTTP/1.").and_then(|rest| rest.get(2..5)?.parse().ok());
    Ok((status.ok_or_else(not_http)?, body.to_owned()))
}

/// Parses JSON. The answers of a server are at most [`DEPTH_MAX`] levels deep; the parser calls
/// itself for each level, and would overflow the stack.
fn parse_json(text: &str) -> Result<JsonValue, String> {
    let (mut depth, mut in_string, mut escaped) = (0u32, false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_string,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => depth += 1,
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > DEPTH_MAX {
            return Err(format!("it is more than {DEPTH_MAX} levels deep"));
        }
    }
    text.parse().map_err(|e: tinyjson::JsonParseError| e.to_string())
}

/// A value of which any member may be missing.
#[derive(Clone, Copy)]
struct Json<'a>(&'a JsonValue);

impl<'a> Json<'a> {
    /// Returns a member, or null.
    fn get(self, name: &str) -> Json<'a> {
        static NULL: JsonValue = JsonValue::Null;
        match self.0 {
            JsonValue::Object(members) => Json(members.get(name).unwrap_or(&NULL)),
            _ => Json(&NULL),
        }
    }

    fn number(self) -> Option<u64> {
        match self.0 {
            // Whole numbers that a `u64` holds.
            JsonValue::Number(n) if *n >= 0.0 && *n < u64::MAX as f64 && n.fract() == 0.0 => {
                Some(*n as u64)
            }
            _ => None,
        }
    }

    fn text(self) -> Option<&'a str> {
        match self.0 {
            JsonValue::String(text) => Some(text),
            _ => None,
        }
    }

    fn list(self) -> Option<impl Iterator<Item = Json<'a>>> {
        match self.0 {
            JsonValue::Array(values) => Some(values.iter().map(Json)),
            _ => None,
        }
    }

    /// As `list`, but empty if there is none.
    fn all(self) -> impl Iterator<Item = Json<'a>> {
        self.list().into_iter().flatten()
    }
}

fn parse(state: Json<'_>, source: String) -> View {
    let number = |value: Json<'_>| value.number().unwrap_or(0);
    let text = |value: Json<'_>| value.text().unwrap_or_default().to_owned();
    let ps: Vec<P> = state
        .get("ps")
        .all()
        .map(|p| P {
            id: number(p.get("id")),
            status: text(p.get("status")),
            m: p.get("m").number(),
            thread: p.get("tid").number(),
            queue: p.get("queue").number(),
            slices: p.get("ticks").number(),
            runs: None,
        })
        .collect();
    let group = |g: Json<'_>| Group {
        is_task: g.get("kind").text() == Some("task"),
        count: number(g.get("count")),
        state: text(g.get("state")),
        function: text(g.get("function")),
        created_at: text(g.get("place")),
        waits_at: text(g.get("waits_at")),
        oldest_ms: g.get("oldest_ms").number(),
        mean_ms: g.get("mean_ms").number(),
        example: number(g.get("example")),
    };
    let user = |u: Json<'_>| {
        let words = std::iter::once(u.get("function")).chain(u.get("labels").all()).map(text);
        User {
            id: number(u.get("id")),
            who: u.get("who").text().map(str::to_owned),
            what: words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" "),
            running_us: number(u.get("running_us")),
            runnable_us: number(u.get("runnable_us")),
        }
    };
    let wait = |w: Json<'_>| {
        let waited = w.get("waited_ms").number();
        let waited = waited.map(|ms| format!(", for {}", super::view::age(ms)));
        format!("{} {}{}", text(w.get("who")), text(w.get("text")), waited.unwrap_or_default())
    };
    let latency = |name: &str| {
        let buckets = state.get("latency").get(name).get("buckets");
        let buckets: Vec<u64> = buckets.list()?.map(number).collect();
        let total: u64 = buckets.iter().sum();
        (total > 0).then(|| (name.to_owned(), quantile(&buckets, 50), quantile(&buckets, 99)))
    };
    let queued: u64 = ps.iter().filter_map(|p| p.queue).sum();
    View {
        program: text(state.get("program")),
        pid: number(state.get("pid")),
        source,
        runtime: number(state.get("runtime")),
        runtimes: state.get("runtimes").all().map(number).collect(),
        uptime_ms: state.get("uptime_ms").number(),
        goroutines: number(state.get("goroutines")),
        tasks: number(state.get("tasks")),
        runnable: number(state.get("global_queue")) + queued,
        threads: number(state.get("threads").get("total")),
        threads_blocked: state.get("threads").get("without_p").number(),
        ps,
        latencies: ["scheduling", "timers", "poll", "kernel"]
            .into_iter()
            .filter_map(latency)
            .collect(),
        groups: state.get("groups").all().map(group).collect(),
        groups_total: number(state.get("groups_total")) as usize,
        users: state.get("usage").list().map(|users| users.map(user).collect()),
        waits: state.get("waits").list().map(|waits| waits.map(wait).collect()),
        waits_total: number(state.get("waits_total")),
        deadlocks: state
            .get("deadlocks")
            .list()
            .map(|all| all.map(|d| text(d.get("text"))).collect()),
    }
}

/// Returns the bound of the bucket in which a percentile is; `u64::MAX` for the last bucket.
fn quantile(buckets: &[u64], percent: u64) -> u64 {
    let total: u64 = buckets.iter().sum();
    let wanted = (total * percent).div_ceil(100).max(1);
    let mut seen = 0;
    let bucket = buckets.iter().position(|n| {
        seen += n;
        seen >= wanted
    });
    match bucket {
        Some(i) if i + 1 < buckets.len() => 1 << i,
        _ => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_servers_are_known_by_their_scheme() {
        let tcp = |text: &str| Some(Address::Tcp(text.to_owned()));
        assert_eq!(Address::parse("http://127.0.0.1:6060"), tcp("127.0.0.1:6060"));
        assert_eq!(Address::parse("http://127.0.0.1:6060/debug/pprof/"), tcp("127.0.0.1:6060"));
        assert_eq!(Address::parse("http://[::1]:6060/"), tcp("[::1]:6060"));
        assert_eq!(Address::parse("http://localhost"), tcp("localhost:80"));
        assert_eq!(Address::parse("127.0.0.1:6060"), tcp("127.0.0.1:6060"));
        assert_eq!(Address::parse("http:///"), None);
        assert_eq!(Address::parse("localhost"), None);
        assert_eq!(Address::parse("https://localhost:1"), None);
        assert_eq!(Address::parse("1234"), None);
    }

    #[test]
    fn an_answer_has_a_status_and_a_body() {
        struct Both(io::Cursor<Vec<u8>>, Vec<u8>);
        impl Read for Both {
            fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
                self.0.read(into)
            }
        }
        impl Write for Both {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.1.write(bytes)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let ask =
            |answer: &str| exchange(Both(io::Cursor::new(answer.into()), Vec::new()), "h", "/");
        let (status, body) = ask("HTTP/1.1 404 Not Found\r\nA: b\r\n\r\ngone\n").unwrap();
        assert_eq!((status, &body[..]), (404, "gone\n"));
        assert!(ask("SSH-2.0\r\n").is_err());
        assert!(ask("HTTP/1.1 x\r\n\r\n").is_err());
    }

    #[test]
    fn a_percentile_is_the_bound_of_its_bucket() {
        assert_eq!(quantile(&[0, 0, 98, 2, 0], 50), 4);
        assert_eq!(quantile(&[0, 0, 98, 2, 0], 99), 8);
        assert_eq!(quantile(&[0, 0, 0, 0, 1], 50), u64::MAX);
    }

    #[test]
    fn deep_json_is_an_error_and_odd_numbers_are_missing() {
        let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert!(parse_json(&deep(DEPTH_MAX as usize)).is_ok());
        assert!(parse_json(&deep(1_000_000)).unwrap_err().contains("levels deep"));
        let brackets = format!(r#""\"{}""#, "[".repeat(1_000));
        assert!(parse_json(&brackets).is_ok(), "they are in a string");
        assert!(parse_json("[1, ").is_err());
        for (text, number) in
            [("7", Some(7)), ("1.5", None), ("-1", None), ("1e300", None), ("\"7\"", None)]
        {
            assert_eq!(Json(&parse_json(text).unwrap()).number(), number, "{text}");
        }
    }

    #[test]
    fn a_state_with_missing_members_is_read_as_far_as_it_goes() {
        let state: JsonValue =
            r#"{"pid": 7, "groups": [{"kind": "task", "count": 3, "waits_at": null}], "ps": 5,
                "usage": [{"id": 1, "labels": ["a=b"]}], "deadlocks": [{"text": "d"}]}"#
                .parse()
                .unwrap();
        let view = parse(Json(&state), String::new());
        assert_eq!((view.pid, view.groups[0].count, view.groups[0].is_task), (7, 3, true));
        assert_eq!(view.users.unwrap()[0].what, "a=b");
        assert_eq!((view.waits.is_none(), view.deadlocks.unwrap()), (true, vec!["d".to_owned()]));
        assert!(view.ps.is_empty());
    }
}
