//! What is measured: one row a workload. A new one is a row here and a function in each worker
//! that is named under `peers`.

pub struct Workload {
    pub name: &'static str,
    pub what: &'static str,
    /// How many processors (Go's P) the runtime gets.
    pub procs: usize,
    /// `KEY=VALUE` words for the worker: `ms` is the time to measure for (500 unless told).
    pub args: &'static [&'static str],
    pub quick_args: &'static [&'static str],
    /// The first one is shown while it runs.
    pub metrics: &'static [Metric],
    pub peers: &'static [&'static str],
    /// Who cannot take part, and why; goes into the report.
    pub absent: &'static [(&'static str, &'static str)],
    /// Memory that must be free, at full size.
    pub needs_gib: u64,
}

/// One number of a sample. Less is better, except for `Goal::Context`.
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
    /// Trefoil's median is at most this.
    AtMost(f64),
    /// No target; compared with Go all the same.
    Report,
    /// Helps to read the others; not compared.
    Context,
}

const fn metric(key: &'static str, unit: &'static str, goal: Goal) -> Metric {
    Metric { key, unit, goal }
}

/// CPU seconds used for each second of wall clock.
const CORES: Metric = metric("cores", "cores busy", Goal::Context);

/// A row that the rows below start from.
const ROW: Workload = Workload {
    name: "",
    what: "",
    procs: 2,
    args: &[],
    quick_args: &["ms=100"],
    metrics: &[],
    peers: &[],
    absent: &[],
    needs_gib: 0,
};

const OUT_OF_MAPS: &str = "a mapping for each stack; it fails at about 32,700 coroutines";

pub static WORKLOADS: &[Workload] = &[
    Workload {
        name: "spawn_join",
        what: "spawn 1000 trivial goroutines, join all; time of one",
        metrics: &[metric("ns_per_op", "ns", Goal::Ratio(0.5)), CORES],
        peers: &["trefoil", "go", "tokio", "may", "smol", "threads"],
        ..ROW
    },
    Workload {
        name: "yield",
        what: "4 goroutines on 2 procs that only yield; time of a yield",
        metrics: &[metric("ns_per_op", "ns", Goal::Ratio(0.1)), CORES],
        peers: &["trefoil", "go", "tokio", "may", "smol", "threads"],
        ..ROW
    },
    Workload {
        name: "fib",
        what: "fib(27): each call spawns its left branch, computes the right, joins; time of a spawn",
        args: &["ms=1000"],
        metrics: &[metric("ns_per_op", "ns", Goal::Ratio(0.45)), CORES],
        peers: &["trefoil", "go", "tokio", "smol"],
        absent: &[("may", OUT_OF_MAPS)],
        ..ROW
    },
    Workload {
        name: "skynet",
        what: "a tree with 1 M leaves, each node spawns 10 and sums them; time of a leaf",
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
        what: "1,000,000 goroutines parked at once: made, measured, released, ended; of one",
        quick_args: &["n=100000"],
        metrics: &[
            metric("total_us", "µs, made + ended", Goal::Ratio(0.8)),
            metric("create_us", "µs, made", Goal::Report),
            metric("end_us", "µs, ended", Goal::Report),
            metric("rss_bytes", "B resident", Goal::AtMost(8_900.0)),
            metric("pte_bytes", "B page tables", Goal::Report),
        ],
        peers: &["trefoil", "go", "tokio", "smol"],
        absent: &[("may", OUT_OF_MAPS)],
        needs_gib: 12,
        ..ROW
    },
    Workload {
        name: "live1m_small",
        what: "live1m with Runtime::builder().dlopen_reserve(false)",
        quick_args: &["n=100000"],
        metrics: &[
            metric("total_us", "µs, made + ended", Goal::Report),
            metric("create_us", "µs, made", Goal::Report),
            metric("end_us", "µs, ended", Goal::Report),
            metric("rss_bytes", "B resident", Goal::AtMost(4_710.0)),
            metric("pte_bytes", "B page tables", Goal::Report),
        ],
        peers: &["trefoil"],
        needs_gib: 12,
        ..ROW
    },
    Workload {
        name: "switch",
        what: "2 goroutines on 1 proc that yield to each other; time of a switch",
        procs: 1,
        metrics: &[metric("ns_per_op", "ns", Goal::Report)],
        peers: &["trefoil", "go", "tokio", "may", "smol", "corosensei"],
        ..ROW
    },
];
