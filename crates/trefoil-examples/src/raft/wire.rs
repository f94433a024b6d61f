//! What nodes and clients say to each other: lines of words.

use super::Entry;
use std::fmt;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::str::FromStr;
use std::time::Duration;

pub(super) enum Request {
    /// A candidate asks for a vote. `last_…` is the last entry of its log.
    Vote { term: u64, candidate: usize, last_index: usize, last_term: u64 },
    /// A leader sends the entries after `prev_…`, and how many are committed.
    Append { term: u64, prev_index: usize, prev_term: u64, committed: usize, entries: Vec<Entry> },
    /// A client adds a command, which is one line.
    Propose { command: String },
}

/// The answer to any request.
pub(super) struct Answer {
    /// The term of the node that answers.
    pub(super) term: u64,
    /// The vote is granted, the entries are added, or the command is committed.
    pub(super) is_yes: bool,
    /// The index of the last entry that was added or committed. If the entries were not added: the
    /// last after which they may be.
    pub(super) index: usize,
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Request::Vote { term, candidate, last_index, last_term } => {
                writeln!(f, "vote {term} {candidate} {last_index} {last_term}")
            }
            Request::Append { term, prev_index, prev_term, committed, entries } => {
                let n = entries.len();
                writeln!(f, "append {term} {prev_index} {prev_term} {committed} {n}")?;
                entries.iter().try_for_each(|e| writeln!(f, "{} {}", e.term, e.command))
            }
            Request::Propose { command } => writeln!(f, "propose {command}"),
        }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} {} {}", self.term, self.is_yes, self.index)
    }
}

impl Request {
    /// # Errors
    /// Fails if the connection does, and with `InvalidData` if this is no request.
    pub(super) fn read(from: &mut impl BufRead) -> io::Result<Request> {
        let line = read_line(from)?;
        let (verb, rest) = line.split_once(' ').ok_or(ErrorKind::InvalidData)?;
        let words = &mut rest.split(' ');
        Ok(match verb {
            "vote" => Request::Vote {
                term: next(words)?,
                candidate: next(words)?,
                last_index: next(words)?,
                last_term: next(words)?,
            },
            "append" => Request::Append {
                term: next(words)?,
                prev_index: next(words)?,
                prev_term: next(words)?,
                committed: next(words)?,
                entries: (0..next(words)?).map(|_| read_entry(from)).collect::<io::Result<_>>()?,
            },
            "propose" => Request::Propose { command: rest.to_owned() },
            _ => return Err(ErrorKind::InvalidData.into()),
        })
    }
}

/// A connection to a node.
pub(super) struct Connection(BufReader<TcpStream>);

impl Connection {
    /// Connects. `timeout` is the longest wait for the connection, and then for each answer.
    pub(super) fn open(address: &str, timeout: Duration) -> io::Result<Connection> {
        let address = address.to_socket_addrs()?.next().ok_or(ErrorKind::NotFound)?;
        let stream = TcpStream::connect_timeout(&address, timeout)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(Connection(BufReader::new(stream)))
    }

    pub(super) fn ask(&mut self, request: &Request) -> io::Result<Answer> {
        self.0.get_mut().write_all(request.to_string().as_bytes())?;
        let line = read_line(&mut self.0)?;
        let words = &mut line.split(' ');
        Ok(Answer { term: next(words)?, is_yes: next(words)?, index: next(words)? })
    }
}

fn read_line(from: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    match line.pop() {
        Some('\n') => Ok(line),
        _ => Err(ErrorKind::UnexpectedEof.into()),
    }
}

fn read_entry(from: &mut impl BufRead) -> io::Result<Entry> {
    let line = read_line(from)?;
    let (term, command) = line.split_once(' ').ok_or(ErrorKind::InvalidData)?;
    let term = term.parse().map_err(|_| ErrorKind::InvalidData)?;
    Ok(Entry { term, command: command.to_owned() })
}

fn next<'a, T: FromStr>(words: &mut impl Iterator<Item = &'a str>) -> io::Result<T> {
    words.next().and_then(|word| word.parse().ok()).ok_or(ErrorKind::InvalidData.into())
}
