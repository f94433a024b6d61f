//! Starts an example and stops it. The tests of `trefoil-compat` use this file too.

// Every test file compiles its own copy and uses its own part of it.
#![allow(dead_code)]

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

/// A running example. Dropping it kills the process.
pub(crate) struct Example {
    pub(crate) child: Child,
    pub(crate) out: BufReader<ChildStdout>,
    pub(crate) addr: SocketAddr,
}

/// Returns the path of an example, which `cargo test` has built. Builds it if only this test was
/// requested.
pub(crate) fn program(name: &str) -> PathBuf {
    let me = std::env::current_exe().unwrap();
    let profile = me.parent().and_then(|deps| deps.parent()).unwrap();
    let path = profile.join("examples").join(name);
    if !path.exists() {
        let kind = profile.file_name().unwrap().to_str().unwrap();
        let status = Command::new(env!("CARGO"))
            .args([
                "build",
                "--example",
                name,
                "--profile",
                if kind == "debug" { "dev" } else { kind },
            ])
            .arg("--target-dir")
            .arg(profile.parent().unwrap())
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .unwrap();
        assert!(status.success());
    }
    path
}

impl Example {
    pub(crate) fn start(name: &str, args: &[&str]) -> Example {
        let mut child = Command::new(program(name))
            .arg("127.0.0.1:0")
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let addr = line
            .trim()
            .rsplit(' ')
            .next()
            .unwrap()
            .parse()
            .expect("an address at the end of the first line");
        Example { child, out, addr }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.addr).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    pub(crate) fn interrupt(&self) {
        // SAFETY: signals a child process that was not waited for yet.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGINT) };
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
