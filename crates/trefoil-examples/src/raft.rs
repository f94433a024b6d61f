//! A replicated log: the consensus algorithm [Raft](https://raft.github.io/raft.pdf) in blocking
//! code.
//!
//! Each node runs [`run`]. The nodes elect a leader; clients [`propose`] commands to it; a command
//! is committed when a majority of the nodes has it on disk, and then every node learns it, in the
//! same order. A minority of the nodes may crash or be cut off at any time.
//!
//! The goroutines of a node share one state under one lock:
//!
//! | goroutine | what it does |
//! |---|---|
//! | [`run`] | accepts connections |
//! | one per connection | reads requests, and answers them (`serve`) |
//! | one per other node | sends it new entries and heartbeats while this node leads (`replicate`) |
//! | one | becomes a candidate when no leader is heard (`campaign`) |
//!
//! Requests and answers are lines of text (`wire.rs`), so is the journal on disk (`journal.rs`).
//! Left out: snapshots, changes of the set of nodes, and reads that do not go through the log.

mod journal;
mod wire;

use journal::Journal;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use trefoil::{go, time};
use wire::{Answer, Connection, Request};

/// How often a leader sends something to every node.
const HEARTBEAT: Duration = Duration::from_millis(100);
/// How long a follower waits for its leader before it becomes a candidate: so many milliseconds,
/// chosen anew each time, so that two nodes seldom become candidates at once.
const PATIENCE_MILLIS: std::ops::Range<u64> = 300..600;
/// How long a leader waits until a command is committed.
const PROPOSAL_TIMEOUT: Duration = Duration::from_secs(2);

/// An entry of the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The term of the leader that has added it.
    pub term: u64,
    /// One line. Every leader begins its term with an empty one.
    pub command: String,
}

/// What a node tells its program.
#[derive(Debug)]
pub enum Event<'a> {
    /// It has been elected in this term, with this log.
    Elected(u64, &'a [Entry]),
    /// The next entry is committed, at this index. Indices begin with 1, also after a restart.
    Committed(usize, &'a Entry),
}

/// A mistake that can be switched on, to see whether tests find it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mistake {
    /// A follower confirms entries before they are durable.
    EntriesNotSynced,
}

/// The settings of a node.
pub struct Config {
    /// The addresses of all nodes.
    pub nodes: Vec<String>,
    /// Which of them this node is.
    pub id: usize,
    /// Where its journal is.
    pub folder: PathBuf,
    /// Called for each event, while the node is locked.
    pub on_event: Box<dyn Fn(Event<'_>) + Send + Sync>,
    /// A mistake to make, in tests of the tests. None otherwise.
    pub mistake: Option<Mistake>,
}

enum Role {
    Follower,
    Candidate { votes: usize },
    Leader(Vec<Progress>),
}

/// What a leader knows about the log of another node.
#[derive(Clone)]
struct Progress {
    /// The index of the next entry to send.
    next: usize,
    /// The node has the same entries up to this index.
    matching: usize,
    /// When it must hear from the leader again.
    heartbeat: Instant,
}

struct State {
    term: u64,
    /// The node that this one has voted for in this term.
    vote: Option<usize>,
    log: Vec<Entry>,
    /// The three fields above, on disk.
    journal: Journal,
    role: Role,
    /// The index of the last entry that is known to be committed.
    committed: usize,
    /// When this node becomes a candidate, unless it hears from a leader.
    patience: Instant,
}

struct Node {
    config: Config,
    state: Mutex<State>,
    /// The role, the log or the committed index has changed.
    changed: Condvar,
}

/// Runs a node until its listener fails.
///
/// # Errors
/// Fails if its address or its journal cannot be opened.
pub fn run(config: Config) -> io::Result<()> {
    let listener = TcpListener::bind(&config.nodes[config.id])?;
    let (journal, saved) = Journal::open(&config.folder)?;
    let state = State {
        term: saved.term,
        vote: saved.vote,
        log: saved.log,
        journal,
        role: Role::Follower,
        committed: 0,
        patience: new_patience(),
    };
    let node = Arc::new(Node { config, state: Mutex::new(state), changed: Condvar::new() });
    for other in node.others() {
        let node = node.clone();
        go(move || node.replicate(other));
    }
    go({
        let node = node.clone();
        move || node.campaign()
    });
    for stream in listener.incoming() {
        let (node, stream) = (node.clone(), stream?);
        // If a connection fails, the client opens another one.
        go(move || node.serve(&stream));
    }
    Ok(())
}

/// Asks one node after the other to add a command to the log, until it is committed. Returns its
/// index, or None after `timeout`.
///
/// A command whose answer is lost is proposed again, and may be in the log twice.
pub fn propose(nodes: &[String], command: &str, timeout: Duration) -> Option<usize> {
    let until = Instant::now() + timeout;
    let request = Request::Propose { command: command.to_owned() };
    for node in nodes.iter().cycle().take_while(|_| Instant::now() < until) {
        let open = Connection::open(node, PROPOSAL_TIMEOUT);
        match open.and_then(|mut connection| connection.ask(&request)) {
            Ok(Answer { is_yes: true, index, .. }) => return Some(index),
            // It does not lead, or is not there.
            _ => time::sleep(HEARTBEAT / 5),
        }
    }
    None
}

fn new_patience() -> Instant {
    Instant::now() + Duration::from_millis(rand::random_range(PATIENCE_MILLIS))
}

impl Node {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let id = self.config.id;
        (0..self.config.nodes.len()).filter(move |&node| node != id)
    }

    /// Answers the requests on a connection.
    fn serve(&self, mut stream: &TcpStream) -> io::Result<()> {
        let mut reader = BufReader::new(stream);
        while !reader.fill_buf()?.is_empty() {
            let answer = self.answer(Request::read(&mut reader)?);
            stream.write_all(answer.to_string().as_bytes())?;
        }
        Ok(())
    }

    fn answer(&self, request: Request) -> Answer {
        match request {
            Request::Vote { term, candidate, last_index, last_term } => {
                self.vote(term, candidate, (last_term, last_index))
            }
            Request::Append { term, prev_index, prev_term, committed, entries } => {
                self.append(term, (prev_index, prev_term), committed, entries)
            }
            Request::Propose { command } => self.propose(command),
        }
    }

    // Elections.

    /// Becomes a candidate whenever no leader is heard.
    fn campaign(self: &Arc<Self>) {
        loop {
            let patience = self.lock().patience;
            time::sleep(patience.saturating_duration_since(Instant::now()));
            let mut state = self.lock();
            if Instant::now() < state.patience {
                continue;
            }
            state.patience = new_patience();
            if let Role::Leader(_) = state.role {
                continue;
            }
            let term = state.term + 1;
            (state.term, state.vote) = (term, Some(self.config.id));
            state.save_term();
            state.role = Role::Candidate { votes: 0 };
            self.gain_vote(&mut state);
            let (last_term, last_index) = state.last();
            drop(state);
            let candidate = self.config.id;
            for other in self.others() {
                let request = Request::Vote { term, candidate, last_index, last_term };
                let node = self.clone();
                go(move || node.request_vote(other, term, &request));
            }
        }
    }

    fn request_vote(&self, other: usize, term: u64, request: &Request) {
        let open = Connection::open(&self.config.nodes[other], HEARTBEAT);
        let answer = open.and_then(|mut connection| connection.ask(request));
        // A vote that does not arrive is no vote.
        let Ok(answer) = answer else { return };
        let mut state = self.lock();
        state.learn_term(answer.term);
        if state.term == term && answer.is_yes {
            self.gain_vote(&mut state);
        }
    }

    /// Counts a vote for this node. It leads if it has a majority.
    fn gain_vote(&self, state: &mut State) {
        let Role::Candidate { votes } = &mut state.role else { return };
        *votes += 1;
        if !self.is_majority(*votes) {
            return;
        }
        (self.config.on_event)(Event::Elected(state.term, &state.log));
        let next = state.log.len() + 1;
        let progress = Progress { next, matching: 0, heartbeat: Instant::now() };
        state.role = Role::Leader(vec![progress; self.config.nodes.len()]);
        self.add(state, String::new());
    }

    fn is_majority(&self, nodes: usize) -> bool {
        2 * nodes > self.config.nodes.len()
    }

    fn vote(&self, term: u64, candidate: usize, last: (u64, usize)) -> Answer {
        let mut state = self.lock();
        state.learn_term(term);
        // A candidate must have every committed entry, so it must be as far as this node.
        let is_granted =
            term == state.term && state.vote.is_none_or(|v| v == candidate) && last >= state.last();
        if is_granted {
            state.vote = Some(candidate);
            state.patience = new_patience();
            state.save_term();
        }
        Answer { term: state.term, is_yes: is_granted, index: 0 }
    }

    // The log.

    /// A leader adds an entry.
    fn add(&self, state: &mut State, command: String) {
        let entry = Entry { term: state.term, command };
        state.write(state.log.len() + 1, entry);
        state.journal.sync();
        self.commit_what_a_majority_has(state);
        self.changed.notify_all();
    }

    fn propose(&self, command: String) -> Answer {
        let mut state = self.lock();
        if !matches!(state.role, Role::Leader(_)) {
            return Answer { term: state.term, is_yes: false, index: 0 };
        }
        self.add(&mut state, command);
        let (term, index) = state.last();
        let until = Instant::now() + PROPOSAL_TIMEOUT;
        while state.term_at(index) == Some(term) {
            if state.committed >= index {
                return Answer { term, is_yes: true, index };
            }
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                break;
            }
            state = self.changed.wait_timeout(state, rest).unwrap().0;
        }
        Answer { term, is_yes: false, index }
    }

    /// Sends another node what it lacks, and heartbeats, whenever this node leads.
    fn replicate(&self, other: usize) {
        let mut connection = None;
        loop {
            let (term, request) = self.next_request(other);
            let mut ask = || {
                let connection = match &mut connection {
                    Some(connection) => connection,
                    none => none.insert(Connection::open(&self.config.nodes[other], HEARTBEAT)?),
                };
                connection.ask(&request)
            };
            match ask() {
                Ok(answer) => self.note_progress(other, term, &answer),
                Err(_) => {
                    // A late answer on this connection would be taken for that to another request.
                    connection = None;
                    time::sleep(HEARTBEAT);
                }
            }
        }
    }

    /// Waits until this node leads, and the other lacks entries or needs a heartbeat.
    fn next_request(&self, other: usize) -> (u64, Request) {
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            let State { term, log, committed, role, .. } = &mut *state;
            let mut wait = Duration::MAX;
            if let Role::Leader(progress) = role {
                let progress = &mut progress[other];
                if progress.next <= log.len() || progress.heartbeat <= now {
                    progress.heartbeat = now + HEARTBEAT;
                    let prev_index = progress.next - 1;
                    let request = Request::Append {
                        term: *term,
                        prev_index,
                        prev_term: term_at(log, prev_index).unwrap_or(0),
                        committed: *committed,
                        entries: log[prev_index..].to_vec(),
                    };
                    return (*term, request);
                }
                wait = progress.heartbeat - now;
            }
            state = self.changed.wait_timeout(state, wait).unwrap().0;
        }
    }

    /// Handles the answer of another node to a [`Request::Append`].
    fn note_progress(&self, other: usize, term: u64, answer: &Answer) {
        let mut state = self.lock();
        state.learn_term(answer.term);
        if state.term != term {
            return;
        }
        let Role::Leader(progress) = &mut state.role else { return };
        let progress = &mut progress[other];
        if answer.is_yes {
            progress.matching = progress.matching.max(answer.index);
            progress.next = progress.matching + 1;
            self.commit_what_a_majority_has(&mut state);
        } else {
            progress.next = (answer.index + 1).min(progress.next - 1).max(1);
        }
    }

    /// A leader commits an entry of its own term that a majority has, and with it all entries
    /// before. An older entry may still be replaced although a majority has it: figure 8 of the
    /// paper.
    fn commit_what_a_majority_has(&self, state: &mut State) {
        let Role::Leader(progress) = &state.role else { return };
        let has = |index| 1 + progress.iter().filter(|other| other.matching >= index).count();
        let is_new = |index| state.term_at(index) == Some(state.term);
        let mut indices = (state.committed + 1..=state.log.len()).rev();
        let index = indices.find(|&index| is_new(index) && self.is_majority(has(index)));
        if let Some(index) = index {
            self.commit(state, index);
        }
    }

    fn commit(&self, state: &mut State, up_to: usize) {
        while state.committed < up_to {
            let entry = &state.log[state.committed];
            state.committed += 1;
            (self.config.on_event)(Event::Committed(state.committed, entry));
        }
        self.changed.notify_all();
    }

    /// Adds the entries of a leader after the entry `prev`, if this node has that one.
    fn append(
        &self,
        term: u64,
        (prev_index, prev_term): (usize, u64),
        committed: usize,
        entries: Vec<Entry>,
    ) -> Answer {
        let mut state = self.lock();
        state.learn_term(term);
        if term < state.term {
            return Answer { term: state.term, is_yes: false, index: 0 };
        }
        state.role = Role::Follower;
        state.patience = new_patience();
        if state.term_at(prev_index) != Some(prev_term) {
            let index = state.log.len().min(prev_index.saturating_sub(1));
            return Answer { term, is_yes: false, index };
        }
        let mut index = prev_index;
        for entry in entries {
            index += 1;
            // An entry that differs is replaced, and all after it are removed.
            if state.term_at(index) != Some(entry.term) {
                state.write(index, entry);
            }
        }
        if self.config.mistake != Some(Mistake::EntriesNotSynced) {
            state.journal.sync();
        }
        let committed = committed.min(index);
        self.commit(&mut state, committed);
        self.changed.notify_all();
        Answer { term, is_yes: true, index }
    }
}

/// Returns the term of an entry. That of the index 0, before the first entry, is 0.
fn term_at(log: &[Entry], index: usize) -> Option<u64> {
    if index == 0 { Some(0) } else { log.get(index - 1).map(|entry| entry.term) }
}

impl State {
    fn term_at(&self, index: usize) -> Option<u64> {
        term_at(&self.log, index)
    }

    /// Returns the term and the index of the last entry.
    fn last(&self) -> (u64, usize) {
        (self.log.last().map_or(0, |entry| entry.term), self.log.len())
    }

    /// Makes the term and the vote durable.
    fn save_term(&mut self) {
        self.journal.write_term(self.term, self.vote);
        self.journal.sync();
    }

    /// Follows if another node is in a later term.
    fn learn_term(&mut self, term: u64) {
        if term > self.term {
            (self.term, self.vote) = (term, None);
            self.save_term();
            self.role = Role::Follower;
        }
    }

    /// Writes an entry, in place of all entries from `index` on. The caller syncs the journal.
    fn write(&mut self, index: usize, entry: Entry) {
        self.journal.write_entry(index, &entry);
        self.log.truncate(index - 1);
        self.log.push(entry);
    }
}
