//! The runtimes that are compared, and how the worker of each is built.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

use crate::golang;

pub struct Peer {
    pub name: &'static str,
    recipe: Recipe,
}

enum Recipe {
    /// `bench-NAME`, a member of this workspace; the crate tells the version.
    Cargo {
        crate_name: Option<&'static str>,
    },
    /// As above, but where the first try fails, once more without its default features: the
    /// workloads behind them then fail, the others run.
    CargoWithFallback {
        crate_name: &'static str,
    },
    Go,
}

pub static PEERS: &[Peer] = &[
    Peer { name: "trefoil", recipe: Recipe::CargoWithFallback { crate_name: "trefoil" } },
    Peer { name: "go", recipe: Recipe::Go },
    Peer { name: "tokio", recipe: Recipe::Cargo { crate_name: Some("tokio") } },
    Peer { name: "may", recipe: Recipe::Cargo { crate_name: Some("may") } },
    Peer { name: "smol", recipe: Recipe::Cargo { crate_name: Some("smol") } },
    Peer { name: "threads", recipe: Recipe::Cargo { crate_name: None } },
    Peer { name: "corosensei", recipe: Recipe::Cargo { crate_name: Some("corosensei") } },
];

/// A worker program, ready to be launched.
pub struct Worker {
    pub peer: &'static str,
    pub program: PathBuf,
    pub version: String,
}

/// Where workers are built.
pub struct Workshop {
    home: PathBuf,
    /// Cargo's target folder; the Go toolchain goes there too.
    pub target: PathBuf,
    pub rustc: String,
    metadata: Value,
}

impl Workshop {
    pub fn open(home: &Path) -> Result<Workshop> {
        let mut command = cargo("metadata", home);
        let metadata = output(command.args(["--format-version", "1"]))?;
        let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata")?;
        let target = metadata["target_directory"].as_str().context("no target folder")?.into();
        let rustc = output(Command::new("rustc").arg("--version"))?.trim().to_owned();
        Ok(Workshop { home: home.to_owned(), target, rustc, metadata })
    }

    /// The worker, and a remark for the report where it is not whole.
    pub fn build(&self, peer: &Peer) -> Result<(Worker, Option<String>)> {
        let mut remark = None;
        let (program, version) = match peer.recipe {
            Recipe::Cargo { crate_name } => {
                (self.cargo_build(peer, &[])?, self.version(crate_name))
            }
            Recipe::CargoWithFallback { crate_name } => {
                let program = self.cargo_build(peer, &[]).or_else(|whole| {
                    let program = self.cargo_build(peer, &["--no-default-features"])?;
                    remark = Some(format!("{} lacks its optional workloads: {whole:#}", peer.name));
                    anyhow::Ok(program)
                })?;
                (program, self.version(Some(crate_name)))
            }
            Recipe::Go => {
                let go = golang::toolchain(&self.target)?;
                (go.build(&self.home.join("go"), &self.target)?, go.version()?)
            }
        };
        Ok((Worker { peer: peer.name, program, version }, remark))
    }

    /// The program of Go's own benchmarks.
    pub fn build_gobench(&self) -> Result<Worker> {
        let go = golang::toolchain(&self.target)?;
        let program = go.build_tests(&self.home.join("go"), &self.target)?;
        Ok(Worker { peer: "go", program, version: go.version()? })
    }

    fn cargo_build(&self, peer: &Peer, extra: &[&str]) -> Result<PathBuf> {
        let package = format!("bench-{}", peer.name);
        let mut command = cargo("build", &self.home);
        command.args(["--release", "--quiet", "--message-format=json-render-diagnostics"]);
        command.args(["--package", &package]).args(extra);
        let messages = output(&mut command)?;
        messages
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .filter(|message| message["target"]["name"] == package.as_str())
            .find_map(|message| message["executable"].as_str().map(PathBuf::from))
            .with_context(|| format!("cargo built no program {package}"))
    }

    /// The version in use of a crate; std's is rustc's.
    fn version(&self, crate_name: Option<&str>) -> String {
        let Some(name) = crate_name else { return self.rustc.clone() };
        let packages = self.metadata["packages"].as_array().map_or(&[][..], Vec::as_slice);
        let package = packages.iter().find(|package| package["name"] == name);
        package.and_then(|package| package["version"].as_str()).unwrap_or("unknown").to_owned()
    }
}

fn cargo(verb: &str, home: &Path) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.arg(verb).arg("--manifest-path").arg(home.join("Cargo.toml"));
    command
}

/// Runs a command to its end and returns what it printed; its first word of error if it fails.
pub fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let done = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| anyhow!("cannot start {name}: {error}"))?;
    if !done.status.success() {
        let stderr = String::from_utf8_lossy(&done.stderr);
        bail!("{}", first_error(&stderr).unwrap_or_else(|| format!("{name}: {}", done.status)));
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// The most telling line: the first that speaks of an error or a panic, else the last one.
pub fn first_error(stderr: &str) -> Option<String> {
    let lines = || stderr.lines().map(str::trim).filter(|line| !line.is_empty());
    let telling = |line: &&str| {
        let line = line.to_lowercase();
        line.contains("error") || line.contains("failed") || line.contains("fatal")
    };
    lines().find(telling).or_else(|| lines().next_back()).map(str::to_owned)
}
