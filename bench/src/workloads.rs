//! What is measured: one row per workload. A new one is a row here and a function in each worker
//! that is named under `peers`.

pub struct Workload {
    pub name: &'static str,
    /// What the worker is asked for, where that is another row's function: see `asks_for`.
    pub function: &'static str,
    pub what: &'static str,
    /// How many processors (Go's P) the runtime gets.
    pub procs: usize,
    /// `KEY=VALUE` words for the worker: `ms` is the time to measure for (default 500).
    pub args: &'static [&'static str],
    pub quick_args: &'static [&'static str],
    /// The first one is shown while it runs.
    pub metrics: &'static [Metric],
    pub peers: &'static [&'static str],
    /// The runtimes that cannot take part, and why; goes into the report.
    pub absent: &'static [(&'static str, &'static str)],
    /// Memory that must be free, at full size.
    pub needs_gib: u64,
    /// A program that the workers launch; none if empty.
    pub needs_program: &'static str,
}

impl Workload {
    /// The workload's name in the workers: defaults to its own.
    pub fn asks_for(&self) -> &'static str {
        if self.function.is_empty() { self.name } else { self.function }
    }
}

/// One number of a sample. Less is better unless [`Goal::more_is_better`] says otherwise.
pub struct Metric {
    /// The key in the worker's JSON line.
    pub key: &'static str,
    pub unit: &'static str,
    pub goal: Goal,
}

#[derive(Clone, Copy)]
pub enum Goal {
    /// Trefoil's median is at most this many times Go's.
    Ratio(f64),
    /// Trefoil's median is at least this many times Go's: more is better.
    RatioAtLeast(f64),
    /// Trefoil's median is at most this many times that of the named runtime.
    RatioTo(&'static str, f64),
    /// Trefoil's median is at least this many times that of the named runtime: more is better.
    RatioToAtLeast(&'static str, f64),
    /// Trefoil's median is at most this.
    AtMost(f64),
    /// Several targets, each counted for itself. None of them is `All`, `Report` or `Context`.
    All(&'static [Goal]),
    /// No target; compared with Go all the same.
    Report,
    /// Helps to read the others; not compared.
    Context,
}

impl Goal {
    /// The single targets; none for `Report` and `Context`.
    pub fn targets(&self) -> &[Goal] {
        match self {
            Goal::All(targets) => targets,
            Goal::Report | Goal::Context => &[],
            target => std::slice::from_ref(target),
        }
    }

    pub fn more_is_better(&self) -> bool {
        let is_least =
            |goal: &Goal| matches!(goal, Goal::RatioAtLeast(_) | Goal::RatioToAtLeast(..));
        self.targets().iter().any(is_least)
    }
}

/// At or below the best of Go and plain threads.
const BEST_OF_GO_AND_THREADS: Goal = Goal::All(&[Goal::Ratio(1.0), Goal::RatioTo("threads", 1.0)]);

const ECHO_64: Goal = Goal::All(&[Goal::RatioAtLeast(1.5), Goal::RatioToAtLeast("may", 1.0)]);
const ECHO_1000: Goal = Goal::All(&[Goal::RatioAtLeast(2.0), Goal::RatioToAtLeast("tokio", 1.0)]);

/// The tokio worker's server is hyper.
const HTTP_64: Goal = Goal::All(&[Goal::RatioAtLeast(1.0), Goal::RatioToAtLeast("tokio", 1.15)]);

const fn metric(key: &'static str, unit: &'static str, goal: Goal) -> Metric {
    Metric { key, unit, goal }
}

/// CPU seconds used for each second of wall clock.
const CORES: Metric = metric("cores", "cores busy", Goal::Context);

/// A row that the rows below start from.
const ROW: Workload = Workload {
    name: "",
    function: "",
    what: "",
    procs: 2,
    args: &[],
    quick_args: &["ms=100"],
    metrics: &[],
    peers: &[],
    absent: &[],
    needs_gib: 0,
    needs_program: "",
};

/// Quantiles of lateness or duration.
const fn p50(goal: Goal) -> Metric {
    metric("p50_us", "µs, p50", goal)
}

const fn p99(goal: Goal) -> Metric {
    metric("p99_us", "µs, p99", goal)
}

/// A row of trefoil and Go alone.
const fn chan_row(name: &'static str, what: &'static str, metrics: &'static [Metric]) -> Workload {
    Workload { name, what, metrics, peers: &["trefoil", "go"], ..ROW }
}

/// `spawn_join` on more or fewer procs: what a spawn costs should not grow with them.
const fn spawn_row(name: &'static str, what: &'static str, procs: usize) -> Workload {
    const METRICS: &[Metric] = &[metric("ns_per_op", "ns", Goal::Ratio(0.5)), CORES];
    Workload { function: "spawn_join", procs, ..chan_row(name, what, METRICS) }
}

/// `ring_1000` with more or fewer nodes (`n=`): what a hop costs should only grow with the caches
/// that it misses.
const fn ring_row(
    name: &'static str,
    what: &'static str,
    args: &'static [&'static str],
) -> Workload {
    const METRICS: &[Metric] = &[metric("ns_per_op", "ns", Goal::Ratio(1.0)), CORES];
    Workload { function: "ring_1000", args, ..chan_row(name, what, METRICS) }
}

/// A row of allocation.
const fn alloc_row(name: &'static str, what: &'static str, metrics: &'static [Metric]) -> Workload {
    Workload { name, what, metrics, peers: &["trefoil", "go", "tokio", "threads"], ..ROW }
}

/// A row of HTTP under wrk.
const fn http_row(name: &'static str, what: &'static str) -> Workload {
    const METRICS: &[Metric] = &[
        metric("per_s", "requests/s", Goal::RatioAtLeast(1.0)),
        p50(Goal::Report),
        p99(Goal::Ratio(1.0)),
        CORES,
    ];
    let peers = &["trefoil", "go", "tokio"];
    Workload { name, what, metrics: METRICS, peers, needs_program: "wrk", ..ROW }
}

/// `http_64` with a longer body (`body=`).
const fn http_body_row(
    name: &'static str,
    what: &'static str,
    args: &'static [&'static str],
) -> Workload {
    const METRICS: &[Metric] = &[
        metric("per_s", "requests/s", Goal::RatioToAtLeast("tokio", 1.0)),
        p50(Goal::Report),
        p99(Goal::Report),
        CORES,
    ];
    let function = "http_64";
    Workload { function, metrics: METRICS, args, quick_args: args, ..http_row(name, what) }
}

/// All runtimes with goroutines or tasks.
const ALL: &[&str] = &["trefoil", "go", "tokio", "may", "smol"];

const NO_BOUND: &str = "its channels have no bound";
const ONE_SLOT: &str = "its smallest channel has one slot";
const NO_SELECT: &str = "it has no select";
const NO_MPMC: &str = "its queues have one receiver";
const OUT_OF_MAPS: &str = "a mapping for each stack; it fails at about 32,700 coroutines";

pub static WORKLOADS: &[Workload] = &[
    Workload {
        name: "spawn_join",
        what: "spawn 1000 trivial goroutines, join all; time per goroutine",
        metrics: &[metric("ns_per_op", "ns", Goal::Ratio(0.5)), CORES],
        peers: &["trefoil", "go", "tokio", "may", "smol", "threads"],
        ..ROW
    },
    spawn_row("spawn_procs_1", "spawn_join on 1 proc", 1),
    spawn_row("spawn_procs_8", "spawn_join on 8 procs", 8),
    spawn_row("spawn_procs_64", "spawn_join on 64 procs", 64),
    Workload {
        name: "yield",
        what: "4 goroutines on 2 procs that only yield; time per yield",
        metrics: &[metric("ns_per_op", "ns", Goal::Ratio(0.1)), CORES],
        peers: &["trefoil", "go", "tokio", "may", "smol", "threads"],
        ..ROW
    },
    Workload {
        name: "fib",
        what: "fib(27): each call spawns its left branch, computes the right, joins; time per spawn",
        args: &["ms=1000"],
        metrics: &[metric("ns_per_op", "ns", Goal::Ratio(0.45)), CORES],
        peers: &["trefoil", "go", "tokio", "smol"],
        absent: &[("may", OUT_OF_MAPS)],
        ..ROW
    },
    Workload {
        name: "skynet",
        what: "a tree with 1 M leaves, each node spawns 10 and sums them; time per leaf",
        args: &["ms=1000"],
        metrics: &[metric("ns_per_op", "ns", Goal::Ratio(0.5)), CORES],
        peers: &["trefoil", "go", "tokio", "smol"],
        absent: &[("may", OUT_OF_MAPS)],
        needs_gib: 6,
        ..ROW
    },
    Workload {
        name: "forkjoin",
        what: "10,000 goroutines with 15 µs of arithmetic each, join all; time of all",
        metrics: &[metric("ms_per_round", "ms", Goal::Ratio(0.92)), CORES],
        peers: &["trefoil", "go", "tokio", "may", "smol", "threads"],
        ..ROW
    },
    Workload {
        name: "live1m",
        what: "1,000,000 goroutines parked at once: made, measured, released, ended; per goroutine",
        quick_args: &["n=100000"],
        metrics: &[
            metric("total_us", "µs, made + ended", Goal::Ratio(1.0)),
            metric("create_us", "µs, made", Goal::Report),
            metric("end_us", "µs, ended", Goal::Report),
            metric("rss_bytes", "B resident", Goal::AtMost(4_700.0)),
            metric("pte_bytes", "B page tables", Goal::Report),
        ],
        peers: &["trefoil", "go", "tokio", "smol"],
        absent: &[("may", OUT_OF_MAPS)],
        needs_gib: 12,
        ..ROW
    },
    Workload {
        name: "live1m_reserve",
        what: "live1m with Runtime::builder().dlopen_reserve(true)",
        quick_args: &["n=100000"],
        metrics: &[
            metric("total_us", "µs, made + ended", Goal::Report),
            metric("create_us", "µs, made", Goal::Report),
            metric("end_us", "µs, ended", Goal::Report),
            metric("rss_bytes", "B resident", Goal::Report),
            metric("pte_bytes", "B page tables", Goal::Report),
        ],
        peers: &["trefoil"],
        needs_gib: 12,
        ..ROW
    },
    Workload {
        name: "switch",
        what: "2 goroutines on 1 proc that yield to each other; time per switch",
        procs: 1,
        metrics: &[metric("ns_per_op", "ns", Goal::Report)],
        peers: &["trefoil", "go", "tokio", "may", "smol", "corosensei"],
        ..ROW
    },
    Workload {
        procs: 1,
        peers: ALL,
        ..chan_row(
            "pingpong_1p",
            "there and back between 2 goroutines by unbuffered channels; time per round trip",
            &[metric("ns_per_op", "ns", Goal::Ratio(0.3)), CORES],
        )
    },
    Workload {
        peers: ALL,
        ..chan_row(
            "pingpong_2p",
            "the same on 2 procs",
            &[metric("ns_per_op", "ns", Goal::Ratio(0.4)), CORES],
        )
    },
    Workload {
        peers: &["trefoil", "go", "tokio", "smol"],
        absent: &[("may", NO_BOUND)],
        ..chan_row(
            "spsc_128",
            "1 sender, 1 receiver, a channel with 128 slots; time per item",
            &[metric("ns_per_op", "ns", Goal::Ratio(0.7)), CORES],
        )
    },
    Workload {
        peers: &["trefoil", "go", "smol"],
        absent: &[("tokio", NO_MPMC), ("may", NO_BOUND)],
        ..chan_row(
            "mpmc_4x4_128",
            "4 senders, 4 receivers, a channel with 128 slots; time per item",
            &[metric("ns_per_op", "ns", Goal::Ratio(0.7)), CORES],
        )
    },
    Workload {
        absent: &[("tokio", ONE_SLOT), ("may", NO_BOUND), ("smol", ONE_SLOT)],
        ..chan_row(
            "select_unbuf",
            "a select over 4 unbuffered channels, a sender each; time per item",
            &[metric("ns_per_op", "ns", Goal::Ratio(0.45)), CORES],
        )
    },
    Workload {
        peers: &["trefoil", "go", "tokio"],
        absent: &[("may", NO_BOUND), ("smol", NO_SELECT)],
        ..chan_row(
            "select_128",
            "a select over 4 channels with 128 slots, a sender each; time per item",
            &[metric("ns_per_op", "ns", Goal::Ratio(0.4)), CORES],
        )
    },
    Workload {
        args: &["ms=1000"],
        needs_gib: 6,
        ..chan_row(
            "skynet_chan",
            "skynet, the sums come by unbuffered channels; time per leaf",
            &[metric("ns_per_op", "ns", Goal::Ratio(0.5)), CORES],
        )
    },
    Workload {
        peers: ALL,
        ..chan_row(
            "ring_1000",
            "a token goes round 1000 goroutines by unbuffered channels; time per hop",
            &[metric("ns_per_op", "ns", Goal::Ratio(0.4)), CORES],
        )
    },
    Workload {
        quick_args: &["ms=100", "n=10"],
        metrics: &[metric("ns_per_op", "ns", Goal::Ratio(0.35)), CORES],
        ..ring_row("ring_10", "the same with 10 goroutines", &["n=10"])
    },
    Workload {
        quick_args: &["ms=100", "n=10000"],
        ..ring_row("ring_100k", "the same with 100,000 goroutines", &["n=100000"])
    },
    Workload {
        quick_args: &["ms=100", "n=50000"],
        needs_gib: 12,
        ..ring_row("ring_1m", "the same with 1,000,000 goroutines", &["n=1000000"])
    },
    chan_row(
        "sieve_2000",
        "the first 2000 primes by a chain of filters and unbuffered channels; time of all",
        &[metric("ms_per_round", "ms", Goal::Ratio(0.35)), CORES],
    ),
    Workload {
        peers: ALL,
        ..chan_row(
            "mutex_8",
            "8 goroutines that lock, count, unlock; time per operation",
            &[metric("ns_per_op", "ns", Goal::Ratio(0.6)), CORES],
        )
    },
    Workload {
        peers: &["trefoil"],
        ..chan_row(
            "std_mutex_8",
            "mutex_8 by std::sync::Mutex",
            &[metric("ns_per_op", "ns", Goal::Report), CORES],
        )
    },
    Workload {
        peers: &["trefoil"],
        ..chan_row(
            "mpsc_pingpong",
            "pingpong_2p by std::sync::mpsc::sync_channel(0)",
            &[metric("ns_per_op", "ns", Goal::Report), CORES],
        )
    },
    alloc_row(
        "alloc_small",
        "2 goroutines that allocate 48 bytes and free them; time per allocate/free pair",
        &[metric("ns_per_op", "ns", Goal::RatioTo("threads", 1.15)), CORES],
    ),
    alloc_row(
        "alloc_mixed",
        "2 goroutines, each with 64 slots, that replace the block in a random slot by one of 8 to \
         2,000 bytes; time per replacement",
        &[metric("ns_per_op", "ns", Goal::RatioTo("threads", 1.15)), CORES],
    ),
    alloc_row(
        "alloc_handoff",
        "4 producers allocate blocks of 64 to 512 bytes and send them in batches of 64, each to a \
         consumer that frees them; time per block",
        &[metric("ns_per_op", "ns", Goal::Ratio(1.0)), CORES],
    ),
    Workload {
        name: "sleep_1000",
        what: "1000 goroutines that sleep 5 times for 1 to 100 ms; how late each wakes",
        quick_args: &["n=100"],
        metrics: &[p50(Goal::Ratio(0.05)), p99(Goal::Ratio(0.1))],
        peers: ALL,
        ..ROW
    },
    Workload {
        name: "sleep_100k",
        what: "100,000 goroutines that sleep once, for 501 to 600 ms; how late, and CPU time of all",
        quick_args: &["n=10000"],
        metrics: &[
            metric("p99_ms", "ms, p99", Goal::Ratio(0.5)),
            metric("cpu_s", "s, CPU", Goal::Ratio(0.7)),
        ],
        peers: &["trefoil", "go", "tokio", "smol"],
        absent: &[("may", OUT_OF_MAPS)],
        ..ROW
    },
    Workload {
        name: "sleep_burst",
        what: "100,000 goroutines that sleep for up to 500 ms as soon as they run, so that timers \
               fire while others are still spawned; how late, counted from the spawn, and from \
               where the sleep began",
        quick_args: &["n=10000"],
        metrics: &[
            metric("spawn_p99_ms", "ms, p99 from spawn", Goal::Ratio(0.5)),
            metric("spawn_p50_ms", "ms, p50 from spawn", Goal::Report),
            metric("p99_ms", "ms, p99", Goal::Ratio(0.5)),
            p50(Goal::Report),
        ],
        peers: &["trefoil", "go", "tokio", "smol"],
        absent: &[("may", OUT_OF_MAPS)],
        ..ROW
    },
    Workload {
        name: "sleep_short",
        what: "1000 goroutines that sleep 10 times for up to 100 ms, so that most wake alone; CPU \
               time of all, how late",
        quick_args: &["n=100"],
        metrics: &[
            metric("cpu_s", "s, CPU", Goal::AtMost(0.15)),
            p50(Goal::AtMost(30.0)),
            p99(Goal::Report),
        ],
        peers: &["trefoil", "go", "tokio", "may", "smol", "threads"],
        ..ROW
    },
    Workload {
        name: "tickers_1000",
        what: "1000 goroutines with a ticker of 100 ms each, spread over the period, for 6 s; CPU \
               time per minute, how late",
        quick_args: &["ms=500"],
        metrics: &[
            metric("cpu_s_per_min", "s, CPU per minute", BEST_OF_GO_AND_THREADS),
            p50(Goal::Report),
            p99(Goal::Report),
        ],
        peers: &["trefoil", "go", "tokio", "threads"],
        ..ROW
    },
    Workload {
        name: "ticker_hogs",
        what: "every ms a tick, beside 4 goroutines that only compute, for 3 s; how late, and the \
               hogs' work: what the least got of it (25 % is fair), all of it (more is better)",
        metrics: &[
            p99(Goal::Ratio(0.15)),
            p50(Goal::Report),
            metric("max_us", "µs, max", Goal::Report),
            metric("least_percent", "%, least hog", Goal::Report),
            metric("chunks_per_ms", "chunks/ms, hogs", Goal::Report),
        ],
        peers: ALL,
        ..ROW
    },
    Workload {
        name: "wake_idle",
        what: "a thread out of a sleep of 2 ms in the kernel (Go: a goroutine locked to it) sends to \
               a goroutine, nothing else runs; time until that runs",
        metrics: &[p50(Goal::Ratio(1.0)), p99(Goal::Ratio(1.0))],
        peers: ALL,
        ..ROW
    },
    Workload {
        name: "block_std",
        what: "64 goroutines that block 20 times for 5 ms: std::thread::sleep, Go's \
               syscall.Nanosleep; time of all (100 ms at best)",
        metrics: &[metric("ms_per_round", "ms", Goal::Ratio(1.1))],
        peers: &["trefoil", "go", "tokio", "smol", "threads"],
        absent: &[("may", "a call that blocks holds up its worker")],
        ..ROW
    },
    Workload {
        name: "block_raw",
        what: "the same by a system call that the runtime is not told of (inline assembly, \
               RawSyscall), and how late ticks of 1 ms are beside it",
        metrics: &[metric("ms_per_round", "ms", Goal::AtMost(160.0)), p99(Goal::Report)],
        peers: &["trefoil", "go"],
        ..ROW
    },
    Workload {
        name: "echo_64",
        what: "64 TCP clients and their echo on loopback, 64 bytes; requests a second (more is \
               better), time of one",
        metrics: &[
            metric("per_s", "requests/s", ECHO_64),
            p50(Goal::Report),
            p99(Goal::Ratio(0.3)),
            CORES,
        ],
        peers: ALL,
        ..ROW
    },
    Workload {
        name: "echo_1000",
        what: "the same with 1000 clients",
        metrics: &[
            metric("per_s", "requests/s", ECHO_1000),
            p50(Goal::Report),
            p99(Goal::Ratio(0.3)),
            CORES,
        ],
        peers: ALL,
        ..ROW
    },
    Workload {
        name: "echo_64_pairs",
        what: "64 TCP clients and their echo, as many round trips for each of them; requests a \
               second until the last has ended (more is better)",
        metrics: &[metric("per_s", "requests/s", ECHO_64), CORES],
        peers: ALL,
        ..ROW
    },
    Workload {
        name: "echo_1000_pairs",
        what: "the same with 1000 clients",
        metrics: &[metric("per_s", "requests/s", ECHO_1000), CORES],
        peers: ALL,
        ..ROW
    },
    Workload {
        name: "echo_1000_std",
        what: "echo_1000 by std::net, on goroutines",
        metrics: &[
            metric("per_s", "requests/s", Goal::Report),
            p50(Goal::Report),
            p99(Goal::Report),
            CORES,
        ],
        peers: &["trefoil"],
        ..ROW
    },
    Workload {
        name: "idle_conns",
        what: "5000 connections, each with a goroutine that waits to read; memory per connection",
        quick_args: &["n=1000"],
        metrics: &[
            metric("rss_bytes", "B resident", Goal::AtMost(5_500.0)),
            metric("pte_bytes", "B page tables", Goal::Report),
        ],
        peers: &["trefoil", "go", "tokio"],
        ..ROW
    },
    Workload {
        name: "conns_idle_10k",
        what: "10,000 connections, 100 requests a second on random ones, from a client process; \
               CPU time of the server per minute, time of a request",
        quick_args: &["n=500", "ms=500"],
        metrics: &[
            metric("cpu_s_per_min", "s, CPU per minute", BEST_OF_GO_AND_THREADS),
            p50(Goal::Report),
            p99(Goal::Report),
        ],
        peers: &["trefoil", "go", "tokio", "threads"],
        ..ROW
    },
    Workload {
        metrics: &[
            metric("per_s", "requests/s", HTTP_64),
            p50(Goal::Report),
            p99(Goal::Ratio(1.0)),
            CORES,
        ],
        ..http_row(
            "http_64",
            "HTTP hello under wrk with 64 connections: httparse, Go's net/http, hyper; requests a \
             second (more is better), time of one",
        )
    },
    http_body_row("http_64_1k", "http_64 with a body of 1 KiB", &["body=1024"]),
    http_body_row("http_64_64k", "http_64 with a body of 64 KiB", &["body=65536"]),
    http_row("http_512", "the same with 512 connections"),
    Workload {
        metrics: &[
            p99(Goal::Ratio(0.3)),
            metric("per_s", "requests/s", Goal::Report),
            p50(Goal::Report),
            CORES,
        ],
        peers: &["trefoil", "go"],
        absent: &[("tokio", "the hogs keep both its workers: nothing is answered")],
        ..http_row("http_64_hogs", "http_64 beside 2 goroutines that only compute")
    },
    task_row(
        "task_spawn_join",
        "spawn_join with tasks: futures on trefoil's scheduler, on tokio's",
        &[metric("ns_per_op", "ns", SPAWN_TASK), CORES],
    ),
    task_row(
        "task_yield",
        "yield with 4 tasks",
        &[metric("ns_per_op", "ns", Goal::AtMost(30.0)), CORES],
    ),
    task_row(
        "task_fib",
        "fib with a task for each left branch",
        &[metric("ns_per_op", "ns", Goal::RatioTo("tokio", 0.25)), CORES],
    ),
    task_row(
        "task_pingpong",
        "two tasks and two channels with one slot, there and back",
        &[metric("ns_per_op", "ns", PING_PONG_OF_TASKS), CORES],
    ),
    Workload {
        quick_args: &["n=100000"],
        needs_gib: 2,
        ..task_row(
            "task_live1m",
            "live1m with tasks",
            &[
                metric("rss_bytes", "B resident", Goal::AtMost(220.0)),
                metric("total_us", "µs, made + ended", Goal::Report),
                metric("create_us", "µs, made", Goal::Report),
                metric("end_us", "µs, ended", Goal::Report),
            ],
        )
    },
    Workload {
        peers: &["trefoil"],
        absent: &[("tokio", "two polls block both its workers: 640 ms")],
        ..task_row(
            "task_block_std",
            "64 tasks whose polls call std::thread::sleep(20 ms), together",
            &[metric("ms_per_round", "ms", Goal::AtMost(25.0))],
        )
    },
    Workload {
        absent: &[("tokio", "the hogs keep both its workers: no tick")],
        peers: &["trefoil"],
        ..task_row(
            "task_ticker_hogs",
            "ticker_hogs with tasks: a task that awaits 1 ms beside 4 tasks that only compute",
            &[
                p99(Goal::AtMost(1_500.0)),
                p50(Goal::Report),
                metric("max_us", "µs, max", Goal::Report),
            ],
        )
    },
    task_http_row(
        "task_http_64",
        "hyper on trefoil's tasks, on tokio's, under wrk, 64 connections",
    ),
    task_http_row("task_http_512", "the same with 512 connections"),
    observe_row(
        "recorder_yield",
        "yield with the flight recorder, and without",
        &[metric("extra_ns", "ns more CPU", Goal::AtMost(3.0)), CPU_WITHOUT],
    ),
    observe_row(
        "recorder_spawn",
        "spawn_join with the flight recorder, and without",
        &[more_cpu(5.0), CPU_WITHOUT],
    ),
    Workload {
        function: "recorder_pingpong",
        procs: 1,
        ..observe_row(
            "recorder_pingpong_1p",
            "pingpong_1p with the flight recorder, and without",
            &[more_cpu(8.0), CPU_WITHOUT],
        )
    },
    Workload {
        function: "recorder_pingpong",
        ..observe_row("recorder_pingpong_2p", "the same on 2 procs", &[more_cpu(8.0), CPU_WITHOUT])
    },
    observe_row(
        "recorder_echo",
        "echo_64_pairs with the flight recorder, and without",
        &[more_cpu(1.5), CPU_WITHOUT],
    ),
    Workload {
        args: &["pairs=25"],
        needs_program: "wrk",
        ..observe_row(
            "recorder_http",
            "http_64 with the flight recorder, and without",
            &[more_cpu(1.5), CPU_WITHOUT],
        )
    },
    observe_row(
        "profile_hogs",
        "as many goroutines as procs that only compute, with a CPU profile at 100 Hz, and without",
        &[more_cpu(1.0), CPU_WITHOUT],
    ),
    observe_row(
        "profile_pingpong",
        "pingpong_2p with a CPU profile at 100 Hz, and without",
        &[more_cpu(1.0), CPU_WITHOUT],
    ),
];

/// A row of what it costs to watch: the CPU time of rounds with a recorder or a profile, over that of
/// rounds without, in one process.
const fn observe_row(
    name: &'static str,
    what: &'static str,
    metrics: &'static [Metric],
) -> Workload {
    Workload { name, what, metrics, quick_args: &["pairs=2"], peers: &["trefoil"], ..ROW }
}

const fn more_cpu(most: f64) -> Metric {
    metric("percent", "% more CPU", Goal::AtMost(most))
}

const CPU_WITHOUT: Metric = metric("cpu_ns", "ns, CPU, without", Goal::Context);

const SPAWN_TASK: Goal = Goal::All(&[Goal::AtMost(150.0), Goal::RatioTo("tokio", 0.25)]);
const PING_PONG_OF_TASKS: Goal = Goal::All(&[Goal::AtMost(200.0), Goal::RatioTo("tokio", 0.5)]);

/// A row of futures, beside tokio.
const fn task_row(name: &'static str, what: &'static str, metrics: &'static [Metric]) -> Workload {
    Workload { name, what, metrics, peers: &["trefoil", "tokio"], ..ROW }
}

const TASK_HTTP: &[Metric] = &[
    metric("per_s", "requests/s", Goal::RatioToAtLeast("tokio", 1.1)),
    p50(Goal::Report),
    p99(Goal::Report),
    CORES,
];

/// A row of hyper under wrk.
const fn task_http_row(name: &'static str, what: &'static str) -> Workload {
    Workload { name, what, metrics: TASK_HTTP, peers: &["trefoil", "tokio"], ..http_row("", "") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_names_only_runtimes_that_take_part() {
        for workload in WORKLOADS {
            for target in workload.metrics.iter().flat_map(|metric| metric.goal.targets()) {
                let other = match target {
                    Goal::Ratio(_) | Goal::RatioAtLeast(_) => "go",
                    Goal::RatioTo(peer, _) | Goal::RatioToAtLeast(peer, _) => peer,
                    Goal::AtMost(_) => "trefoil",
                    Goal::All(_) | Goal::Report | Goal::Context => panic!("not a single target"),
                };
                assert!(workload.peers.contains(&other), "{} names {other}", workload.name);
            }
        }
    }

    #[test]
    fn all_targets_of_a_metric_point_the_same_way() {
        for workload in WORKLOADS {
            for goal in workload.metrics.iter().map(|metric| metric.goal) {
                let targets = goal.targets();
                let more = targets.iter().filter(|target| target.more_is_better()).count();
                assert!(more == 0 || more == targets.len(), "{}", workload.name);
            }
        }
    }
}
