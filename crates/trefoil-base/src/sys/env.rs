//! The environment variables of the runtime.
//!
//! | variable | meaning |
//! |---|---|
//! | `TREFOIL_PROCS` | number of Ps, 1 to 1024 |
//! | `GOMAXPROCS` | the same, if `TREFOIL_PROCS` is not set |
//! | `TREFOIL_DLOPEN_RESERVE` | `1`: goroutines keep room for libraries with initial-exec TLS |
//! | `TREFOIL_DEBUG` | `key=value` pairs, separated by commas; the keys are in `KEYS` |
//! | `TREFOIL_TRACE` | `on`, `off` or `0`, `on=INCIDENT:TIME`, `on=signal:NAME`, `bytes=N` (with `K`, `M` or `G`), `clock=exact`, `dir=PATH`, separated by commas |
//!
//! An empty variable counts as unset. An invalid value is an error that names the variable. (Go
//! ignores invalid values; but a user who sets `TREFOIL_PROCS=4x` made a mistake and should see
//! it.)

use std::time::Duration;
use std::{env, fs, io};

use super::cpus::parse_procs;

/// The settings; a variable that is not set leaves the default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Env {
    /// Number of Ps.
    pub procs: Option<usize>,
    /// TLS blocks keep glibc's reserve for dlopen.
    pub dlopen_reserve: Option<bool>,
    /// Interval between two lines of the scheduler's trace, in milliseconds.
    pub schedtrace_ms: Option<u64>,
    /// The trace shows every P, M and G.
    pub scheddetail: bool,
    /// Goroutines are not preempted by a signal.
    pub asyncpreemptoff: bool,
    /// The preemption signal. Defaults to SIGURG.
    pub preempt_signal: Option<i32>,
    /// How long a goroutine may run while others wait, in microseconds.
    pub slice_us: Option<u64>,
    /// TLS blocks come from `pthread_create`, the fallback.
    pub tls_pthread: bool,
    /// Goroutines that wait for each other are reported.
    pub deadlockreport: Option<bool>,
    /// Guard pages by `mprotect`, as on kernels before 6.13.
    pub guards_mprotect: bool,
    /// The flight recorder is on from the start.
    pub trace: Option<TraceEnv>,
}

/// What `TREFOIL_TRACE` says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TraceEnv {
    /// Memory of the rings.
    pub bytes: Option<usize>,
    /// Each event has a clock.
    pub exact_clock: bool,
    /// Where files are written.
    pub dir: Option<String>,
    /// After which incidents a file is written, and how long they must last.
    pub watches: Vec<(WatchEnv, Duration)>,
}

/// An incident that `TREFOIL_TRACE=on=…` names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WatchEnv {
    Runnable,
    Late,
    Blocked,
    /// This signal arrives.
    Signal(i32),
}

/// The signals that `TREFOIL_TRACE=on=signal:…` knows by name.
const SIGNALS: [(&str, i32); 8] = [
    ("HUP", libc::SIGHUP),
    ("INT", libc::SIGINT),
    ("QUIT", libc::SIGQUIT),
    ("USR1", libc::SIGUSR1),
    ("USR2", libc::SIGUSR2),
    ("ALRM", libc::SIGALRM),
    ("TERM", libc::SIGTERM),
    ("WINCH", libc::SIGWINCH),
];

const TREFOIL_PROCS: &str = "TREFOIL_PROCS";
const GOMAXPROCS: &str = "GOMAXPROCS";
const TREFOIL_DLOPEN_RESERVE: &str = "TREFOIL_DLOPEN_RESERVE";
const TREFOIL_DEBUG: &str = "TREFOIL_DEBUG";
const TREFOIL_TRACE: &str = "TREFOIL_TRACE";

/// What `TREFOIL_TRACE` takes.
const TRACE_HELP: &str = "expected on, off, on=runnable:TIME, on=late:TIME, on=blocked:TIME (such as 10ms), on=signal:NAME (such as USR1), on=panic, bytes=NUMBER, clock=exact or dir=PATH";

/// The keys of `TREFOIL_DEBUG` and what each takes.
const KEYS: [(&str, &str); 8] = [
    ("schedtrace", "MILLISECONDS"),
    ("scheddetail", "0|1"),
    ("asyncpreemptoff", "0|1"),
    ("preemptsignal", "NUMBER"),
    ("deadlockreport", "0|1"),
    ("slice", "MICROSECONDS"),
    ("tls", "pthread"),
    ("guards", "mprotect"),
];

/// Returns whether the runtime may obey the environment: not in a program that has more rights than
/// its caller (setuid), because the caller has made the environment.
pub fn is_trusted() -> bool {
    // SAFETY: reads a number that the kernel has passed to the process.
    unsafe { libc::getauxval(libc::AT_SECURE) == 0 }
}

/// Reads the environment of the process.
pub fn read() -> Result<Env, String> {
    if !is_trusted() {
        return Ok(Env::default());
    }
    let vars = [TREFOIL_PROCS, GOMAXPROCS, TREFOIL_DLOPEN_RESERVE, TREFOIL_DEBUG, TREFOIL_TRACE];
    let env = parse(vars.into_iter().filter_map(|var| {
        // What is not UTF-8 becomes a value that no parser accepts.
        Some((var, env::var_os(var)?.to_string_lossy().into_owned()))
    }))?;
    if let Some(dir) = env.trace.as_ref().and_then(|trace| trace.dir.as_ref()) {
        check_dir(dir)?;
    }
    Ok(env)
}

/// Returns an error if no file can be written to `dir`, because it is no folder.
fn check_dir(dir: &str) -> Result<(), String> {
    let error = |why: &str| Err(format!("{TREFOIL_TRACE}=dir={}: {why}", dir.escape_debug()));
    match fs::metadata(dir) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => error("it is not a folder"),
        Err(e) if e.kind() == io::ErrorKind::NotFound => error("there is no such folder"),
        Err(e) => error(&e.to_string()),
    }
}

/// Parses these variables; unknown ones are skipped.
fn parse<K, V>(vars: impl IntoIterator<Item = (K, V)>) -> Result<Env, String>
where
    K: AsRef<str>,
    V: AsRef<str>,
{
    let mut env = Env::default();
    let mut ours = None;
    let mut gos = None;
    for (var, value) in vars {
        let value = value.as_ref();
        match var.as_ref() {
            _ if value.is_empty() => {}
            TREFOIL_PROCS => ours = Some(parse_procs(TREFOIL_PROCS, value)),
            GOMAXPROCS => gos = Some(parse_procs(GOMAXPROCS, value)),
            TREFOIL_DLOPEN_RESERVE => env.dlopen_reserve = Some(parse_reserve(value)?),
            TREFOIL_DEBUG => parse_debug(value, &mut env)?,
            TREFOIL_TRACE if matches!(value, "off" | "0") => env.trace = None,
            TREFOIL_TRACE => env.trace = Some(parse_trace(value)?),
            _ => {}
        }
    }
    // An invalid value of Go's variable is no error if ours is set.
    env.procs = ours.or(gos).transpose()?;
    Ok(env)
}

fn parse_reserve(value: &str) -> Result<bool, String> {
    match value {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(format!("{TREFOIL_DLOPEN_RESERVE}={}: expected 0 or 1", value.escape_debug())),
    }
}

fn parse_debug(text: &str, env: &mut Env) -> Result<(), String> {
    for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let valid = match key {
            "schedtrace" => match value.parse() {
                Ok(ms) => {
                    env.schedtrace_ms = Some(ms).filter(|&ms| ms > 0);
                    true
                }
                Err(_) => false,
            },
            "scheddetail" => parse_switch(value, &mut env.scheddetail),
            "asyncpreemptoff" => parse_switch(value, &mut env.asyncpreemptoff),
            "deadlockreport" => {
                let mut report = false;
                let valid = parse_switch(value, &mut report);
                env.deadlockreport = Some(report);
                valid
            }
            "preemptsignal" => match value.parse() {
                Ok(n @ 1..=64) if ![libc::SIGKILL, libc::SIGSTOP, 32, 33].contains(&n) => {
                    env.preempt_signal = Some(n);
                    true
                }
                _ => false,
            },
            "slice" => match value.parse() {
                Ok(us @ 1..=10_000_000) => {
                    env.slice_us = Some(us);
                    true
                }
                _ => false,
            },
            "tls" => parse_word(value, "pthread", &mut env.tls_pthread),
            "guards" => parse_word(value, "mprotect", &mut env.guards_mprotect),
            _ => false,
        };
        if !valid {
            return Err(format!("{TREFOIL_DEBUG}={}: {}", pair.escape_debug(), help(key)));
        }
    }
    Ok(())
}

fn parse_trace(text: &str) -> Result<TraceEnv, String> {
    let mut trace = TraceEnv::default();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        let valid = match key {
            // A panic always is an incident.
            "on" if matches!(value, "" | "panic") => true,
            "on" => match parse_watch(value) {
                Some(watch) => {
                    trace.watches.push(watch);
                    true
                }
                None => false,
            },
            "bytes" => {
                trace.bytes = parse_bytes(value);
                trace.bytes.is_some()
            }
            "clock" => parse_word(value, "exact", &mut trace.exact_clock),
            "dir" => {
                trace.dir = Some(value.into());
                !value.is_empty()
            }
            _ => false,
        };
        if !valid {
            let part = part.escape_debug();
            return Err(format!("{TREFOIL_TRACE}={part}: {TRACE_HELP}"));
        }
    }
    Ok(trace)
}

/// Parses an incident and its length: `runnable:10ms`, or a signal: `signal:USR1`.
fn parse_watch(text: &str) -> Option<(WatchEnv, Duration)> {
    let (kind, limit) = text.split_once(':')?;
    let kind = match kind {
        "signal" => return Some((WatchEnv::Signal(parse_signal(limit)?), Duration::ZERO)),
        "runnable" => WatchEnv::Runnable,
        "late" => WatchEnv::Late,
        "blocked" => WatchEnv::Blocked,
        _ => return None,
    };
    let digits = limit.bytes().take_while(u8::is_ascii_digit).count();
    let number: u64 = limit[..digits].parse().ok()?;
    let limit = match &limit[digits..] {
        "us" => Duration::from_micros(number),
        "ms" => Duration::from_millis(number),
        "s" => Duration::from_secs(number),
        _ => return None,
    };
    Some((kind, limit))
}

/// Parses a signal: its name, with or without `SIG`, or its number.
fn parse_signal(text: &str) -> Option<i32> {
    let name = text.strip_prefix("SIG").unwrap_or(text);
    match SIGNALS.iter().find(|(known, _)| *known == name) {
        Some(&(_, signal)) => Some(signal),
        None => text.parse().ok().filter(|signal| *signal > 0),
    }
}

/// Parses a number of bytes, which may end in `K`, `M` or `G`.
fn parse_bytes(text: &str) -> Option<usize> {
    let (number, unit) = match text.char_indices().last()? {
        (i, 'K' | 'k') => (&text[..i], 1 << 10),
        (i, 'M' | 'm') => (&text[..i], 1 << 20),
        (i, 'G' | 'g') => (&text[..i], 1 << 30),
        _ => (text, 1),
    };
    number.parse::<usize>().ok()?.checked_mul(unit)
}

/// Sets `to` from `0` or `1`; returns false if the value is neither.
fn parse_switch(value: &str, to: &mut bool) -> bool {
    *to = value == "1";
    matches!(value, "0" | "1")
}

/// Sets `to` if the value is `word`; returns false if it is not.
fn parse_word(value: &str, word: &str, to: &mut bool) -> bool {
    *to = value == word;
    *to
}

/// Describes the valid values of a key, or the valid keys.
fn help(key: &str) -> String {
    match KEYS.iter().find(|(known, _)| *known == key) {
        Some((key, values)) => format!("expected {key}={values}"),
        None => {
            let known = KEYS.map(|(key, values)| format!("{key}={values}"));
            format!("unknown key {}; known are {}", key.escape_debug(), known.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trace_has_a_size_and_a_folder() {
        let trace = |value| parse([(TREFOIL_TRACE, value)]).map(|env| env.trace);
        assert_eq!(trace(""), Ok(None));
        assert_eq!(trace("on"), Ok(Some(TraceEnv::default())));
        let (bytes, dir) = (Some(16 << 20), Some("/tmp/t".into()));
        let both = TraceEnv { bytes, dir, ..TraceEnv::default() };
        assert_eq!(trace("on, bytes=16M,dir=/tmp/t"), Ok(Some(both)));
        let error = |part| Err(format!("TREFOIL_TRACE={part}: {TRACE_HELP}"));
        assert_eq!((trace("off"), trace("0")), (Ok(None), Ok(None)));
        assert_eq!(trace("on,on=panic"), Ok(Some(TraceEnv::default())));
        for part in ["no", "on=1", "bytes=", "bytes=M", "bytes=1T", "dir=", "on=runnable"] {
            assert_eq!(trace(part), error(part), "{part}");
        }
    }

    #[test]
    fn trace_names_incidents() {
        let watches =
            |value| parse([(TREFOIL_TRACE, value)]).ok().and_then(|env| Some(env.trace?.watches));
        let ms = Duration::from_millis;
        assert_eq!(
            watches("on,on=runnable:10ms,on=late:500us,on=blocked:2s"),
            Some(vec![
                (WatchEnv::Runnable, ms(10)),
                (WatchEnv::Late, Duration::from_micros(500)),
                (WatchEnv::Blocked, ms(2000)),
            ])
        );
        let signal = |signal| Some(vec![(WatchEnv::Signal(signal), Duration::ZERO)]);
        assert_eq!(watches("on,on=signal:USR1"), signal(libc::SIGUSR1));
        assert_eq!(watches("on=signal:SIGHUP"), signal(libc::SIGHUP));
        assert_eq!(watches("on=signal:12"), signal(12));
        for wrong in ["on=signal", "on=signal:", "on=signal:FOO", "on=signal:-1"] {
            assert_eq!(watches(wrong), None, "{wrong}");
        }
        for wrong in ["on=late", "on=late:", "on=late:ms", "on=late:5", "on=late:5h", "on=x:5ms"] {
            assert_eq!(watches(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_folder_for_traces_must_exist() {
        assert_eq!(check_dir("/"), Ok(()));
        let missing = "/no such folder";
        let error = format!("TREFOIL_TRACE=dir={missing}: there is no such folder");
        assert_eq!(check_dir(missing), Err(error));
        let error = "TREFOIL_TRACE=dir=/proc/self/maps: it is not a folder";
        assert_eq!(check_dir("/proc/self/maps"), Err(error.into()));
    }

    fn debug(value: &str) -> Result<Env, String> {
        parse([(TREFOIL_DEBUG, value)])
    }

    #[test]
    fn an_empty_environment_gives_the_defaults() {
        assert_eq!(parse::<&str, &str>([]), Ok(Env::default()));
        let empty = [(TREFOIL_PROCS, ""), (GOMAXPROCS, ""), (TREFOIL_DEBUG, ""), ("PATH", "/bin")];
        assert_eq!(parse(empty), Ok(Env::default()));
    }

    #[test]
    fn trefoil_procs_overrides_gomaxprocs_in_any_order() {
        for vars in [
            [(TREFOIL_PROCS, "3"), (GOMAXPROCS, "5")],
            [(GOMAXPROCS, "5"), (TREFOIL_PROCS, "3")],
            [(GOMAXPROCS, "garbage"), (TREFOIL_PROCS, "3")],
        ] {
            assert_eq!(parse(vars).unwrap().procs, Some(3));
        }
        assert_eq!(parse([(TREFOIL_PROCS, ""), (GOMAXPROCS, "5")]).unwrap().procs, Some(5));
    }

    #[test]
    fn dlopen_reserve_is_0_or_1() {
        let reserve = |value| parse([(TREFOIL_DLOPEN_RESERVE, value)]);
        assert_eq!(reserve("0").unwrap().dlopen_reserve, Some(false));
        assert_eq!(reserve("1").unwrap().dlopen_reserve, Some(true));
        assert_eq!(reserve("").unwrap().dlopen_reserve, None);
        let error = reserve("yes").unwrap_err();
        assert_eq!(error, "TREFOIL_DLOPEN_RESERVE=yes: expected 0 or 1");
    }

    #[test]
    fn an_error_names_the_variable() {
        for var in [TREFOIL_PROCS, GOMAXPROCS] {
            let error = parse([(var, "0")]).unwrap_err();
            assert_eq!(error, format!("{var}=0: expected a whole number from 1 to 1024"));
        }
    }

    #[test]
    fn all_keys_are_parsed() {
        let env = debug(
            "schedtrace=1000, scheddetail=1,,asyncpreemptoff=1,preemptsignal=34,slice=50,\
             tls=pthread,guards=mprotect,deadlockreport=0,",
        );
        let all = Env {
            procs: None,
            dlopen_reserve: None,
            schedtrace_ms: Some(1000),
            scheddetail: true,
            asyncpreemptoff: true,
            preempt_signal: Some(34),
            slice_us: Some(50),
            tls_pthread: true,
            guards_mprotect: true,
            deadlockreport: Some(false),
            trace: None,
        };
        assert_eq!(env, Ok(all));
        assert_eq!(debug("schedtrace=0,scheddetail=0,asyncpreemptoff=0"), Ok(Env::default()));
    }

    #[test]
    fn an_invalid_value_is_an_error_that_names_the_key() {
        for (value, error) in [
            (
                "scheddetail=1,schedtrace=fast",
                "TREFOIL_DEBUG=schedtrace=fast: expected schedtrace=MILLISECONDS",
            ),
            ("scheddetail", "TREFOIL_DEBUG=scheddetail: expected scheddetail=0|1"),
            (
                "asyncpreemptoff=yes",
                "TREFOIL_DEBUG=asyncpreemptoff=yes: expected asyncpreemptoff=0|1",
            ),
            ("tls=", "TREFOIL_DEBUG=tls=: expected tls=pthread"),
            ("guards=1", "TREFOIL_DEBUG=guards=1: expected guards=mprotect"),
            ("deadlockreport=no", "TREFOIL_DEBUG=deadlockreport=no: expected deadlockreport=0|1"),
        ] {
            assert_eq!(debug(value).unwrap_err(), error);
        }
        assert!(debug("schedtrace=-1").is_err());
    }

    #[test]
    fn an_unknown_key_is_an_error_that_lists_the_known_keys() {
        for value in ["madvise=1", "=", "schedtrace =1", "\0"] {
            let error = debug(value).unwrap_err();
            assert!(error.contains("unknown key"), "{error}");
            assert!(KEYS.iter().all(|(key, _)| error.contains(key)), "{error}");
        }
    }
}
