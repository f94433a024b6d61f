//! A replicated log: three nodes on this machine elect a leader, and commit five commands.
//!
//! `cargo run --release --example raft`
//!
//! The nodes are in `src/raft.rs`. `tests/raft.rs` runs them on simulated hosts, which crash and
//! lose their links.

use std::net::TcpListener;
use std::time::Duration;
use std::{fs, io, process};
use trefoil::{chan, go};
use trefoil_examples::raft::{self, Config, Event};

const NODES: usize = 3;

/// Returns addresses that are free at the moment.
fn free_addresses() -> io::Result<Vec<String>> {
    let listeners: io::Result<Vec<_>> =
        (0..NODES).map(|_| TcpListener::bind("127.0.0.1:0")).collect();
    listeners?.iter().map(|listener| Ok(listener.local_addr()?.to_string())).collect()
}

#[trefoil::main]
fn main() -> io::Result<()> {
    let nodes = free_addresses()?;
    let root = std::env::temp_dir().join(format!("raft-{}", process::id()));
    let (tx, committed) = chan::bounded(100);
    for id in 0..NODES {
        let folder = root.join(id.to_string());
        fs::create_dir_all(&folder)?;
        let tx = tx.clone();
        let on_event = move |event: Event<'_>| match event {
            Event::Elected(term, _) => println!("node {id} leads in term {term}"),
            Event::Committed(_, entry) if entry.command.is_empty() => {}
            Event::Committed(_, entry) => _ = tx.try_send((id, entry.command.clone())),
        };
        let on_event = Box::new(on_event);
        let config = Config { nodes: nodes.clone(), id, folder, on_event, mistake: None };
        go(move || raft::run(config));
    }
    let commands = ["one", "two", "three", "four", "five"];
    for command in commands {
        let index = raft::propose(&nodes, command, Duration::from_secs(30));
        index.ok_or(io::ErrorKind::TimedOut)?;
    }
    let mut logs = vec![Vec::new(); NODES];
    for (id, command) in committed.iter().take(NODES * commands.len()) {
        logs[id].push(command);
    }
    for (id, log) in logs.iter().enumerate() {
        println!("node {id}: {}", log.join(" "));
    }
    fs::remove_dir_all(root)
}
