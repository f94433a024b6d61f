//! A snapshot as a file: a line of text, then numbers of eight bytes, the lowest first.
//!
//! ```text
//! "trefoil trace 3\n"
//! id of the process, the wall clock in nanoseconds since 1970
//! when it was copied, number of Ps
//! for each P, then for the threads without one:  first, from, number of words, the words
//! number of texts,  for each: address, length, its bytes
//! number of names,  for each: id, length, its bytes
//! the program: length, its bytes
//! number of places,  for each: number, length, its bytes
//! number of wake-ups,  for each: woken, when, waker, number of its place
//! ```
//!
//! A file of version 2 ends with the program. Version 1 has neither the second line nor the program.
//! Their files are still read.
//!
//! To find the places may take seconds, and the process may end before or while they are written.
//! So a file that is cut off behind the program is read up to there.

use super::wakes::{PlacedWake, Wakes};
use super::{Origin, Snapshot};
use crate::sched::MAX_PROCS;
use crate::sched::record::{RecordCopy, RingCopy, Word};
use crate::sys::map::Map;
use std::io::{self, Read, Write};
use std::sync::Arc;

const MAGIC: &[u8; 16] = b"trefoil trace 3\n";
const MAGIC_2: &[u8; 16] = b"trefoil trace 2\n";
const MAGIC_1: &[u8; 16] = b"trefoil trace 1\n";
/// What all versions begin with.
const MAGIC_START: &[u8] = b"trefoil trace ";
/// The longest text that is read.
const TEXT_BYTES_MAX: u64 = 1 << 16;

/// Calls `find_places` when all but the places is written.
pub(super) fn write(
    snapshot: &Snapshot,
    to: impl Write,
    find_places: impl FnOnce(&Wakes),
) -> io::Result<()> {
    let mut to = io::BufWriter::new(to);
    let record = &snapshot.record;
    match &snapshot.origin {
        Some(origin) => {
            to.write_all(MAGIC)?;
            put(&mut to, origin.pid.into())?;
            put(&mut to, origin.taken)?;
        }
        None => to.write_all(MAGIC_1)?,
    }
    put(&mut to, record.copied)?;
    put(&mut to, record.ps.len() as u64)?;
    for ring in record.rings() {
        put(&mut to, ring.first)?;
        put(&mut to, ring.from)?;
        put(&mut to, ring.words.len() as u64)?;
        ring.words.iter().try_for_each(|word| put(&mut to, word.0))?;
    }
    put_texts(&mut to, snapshot.texts())?;
    put_texts(&mut to, &snapshot.names)?;
    if let Some(origin) = &snapshot.origin {
        put_text(&mut to, &origin.program)?;
        to.flush()?;
        find_places(&snapshot.wakes);
        put_wakes(&mut to, snapshot.wakes.all())?;
    }
    to.flush()
}

pub(super) fn read(from: impl Read) -> io::Result<Snapshot> {
    read_sections(io::BufReader::new(from)).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => invalid("a trace that is cut off"),
        _ => e,
    })
}

/// As [`read`]. The error of a file that is cut off is `UnexpectedEof`.
fn read_sections(mut from: impl Read) -> io::Result<Snapshot> {
    let mut magic = Vec::new();
    from.by_ref().take(MAGIC.len() as u64).read_to_end(&mut magic)?;
    let common = magic.len().min(MAGIC_START.len());
    if magic[..common] != MAGIC_START[..common] {
        return Err(invalid("not a trace of trefoil"));
    }
    let Ok(magic) = <[u8; MAGIC.len()]>::try_from(magic) else {
        return Err(io::ErrorKind::UnexpectedEof.into());
    };
    let process = match &magic {
        MAGIC | MAGIC_2 => {
            let (pid, taken) = (get(&mut from)?, get(&mut from)?);
            let pid = u32::try_from(pid).map_err(|_| invalid("a trace with a wrong process id"))?;
            Some((pid, taken))
        }
        MAGIC_1 => None,
        _ => return Err(invalid("a trace of another version of trefoil: this one reads 1 to 3")),
    };
    let copied = get(&mut from)?;
    let count = get(&mut from)?;
    if count > MAX_PROCS as u64 {
        return Err(invalid("a trace with too many Ps"));
    }
    let ps = (0..count).map(|_| get_ring(&mut from)).collect::<io::Result<_>>()?;
    let outside = get_ring(&mut from)?;
    let texts = get_texts(&mut from)?.into();
    let names = get_texts(&mut from)?;
    let origin = match process {
        Some((pid, taken)) => Some(Origin { pid, taken, program: get_text(&mut from)? }),
        None => None,
    };
    let mut wakes = Vec::new();
    if &magic == MAGIC {
        match get_wakes(&mut from, &mut wakes) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {}
            result => result?,
        }
    }
    let wakes = Wakes::read(wakes);
    let record = RecordCopy { copied, since_end: 0, waker_samples: None, ps, outside };
    Ok(Snapshot { record, texts, names, wakes, origin })
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn put(to: &mut impl Write, n: u64) -> io::Result<()> {
    to.write_all(&n.to_le_bytes())
}

fn get(from: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn get_ring(from: &mut impl Read) -> io::Result<RingCopy> {
    let (first, since, count) = (get(from)?, get(from)?, get(from)?);
    // Not allocated at once: the number may be wrong.
    let words = (0..count).map(|_| get(from).map(Word)).collect::<io::Result<_>>()?;
    Ok(RingCopy { first, from: since, words })
}

/// Each place is written once.
fn put_wakes(to: &mut impl Write, wakes: &[PlacedWake]) -> io::Result<()> {
    let mut numbers: Map<&str, u64> = Map::new();
    for wake in wakes {
        let next = numbers.len() as u64;
        numbers.get_or_insert_with(&wake.place, || next);
    }
    put(to, numbers.len() as u64)?;
    for (place, number) in numbers.entries() {
        put(to, *number)?;
        put_text(to, place)?;
    }
    put(to, wakes.len() as u64)?;
    for wake in wakes {
        [wake.woken, wake.at, wake.waker, numbers[&*wake.place]]
            .iter()
            .try_for_each(|n| put(to, *n))?;
    }
    Ok(())
}

/// Adds the wake-ups to `wakes`, those before an error included.
fn get_wakes(from: &mut impl Read, wakes: &mut Vec<PlacedWake>) -> io::Result<()> {
    let places: Map<u64, Arc<str>> =
        get_texts(from)?.into_iter().map(|(number, place)| (number, place.into())).collect();
    for _ in 0..get(from)? {
        let (woken, at, waker) = (get(from)?, get(from)?, get(from)?);
        let place = places.get(&get(from)?).ok_or_else(|| invalid("a trace without a place"))?;
        wakes.push(PlacedWake { woken, at, waker, place: place.clone() });
    }
    Ok(())
}

fn put_texts(to: &mut impl Write, texts: &Map<u64, Box<str>>) -> io::Result<()> {
    put(to, texts.len() as u64)?;
    for (key, text) in texts.entries() {
        put(to, *key)?;
        put_text(to, text)?;
    }
    Ok(())
}

fn put_text(to: &mut impl Write, text: &str) -> io::Result<()> {
    put(to, text.len() as u64)?;
    to.write_all(text.as_bytes())
}

fn get_texts(from: &mut impl Read) -> io::Result<Map<u64, Box<str>>> {
    let mut texts = Map::new();
    for _ in 0..get(from)? {
        let key = get(from)?;
        texts.insert(key, get_text(from)?);
    }
    Ok(texts)
}

fn get_text(from: &mut impl Read) -> io::Result<Box<str>> {
    let len = get(from)?;
    if len > TEXT_BYTES_MAX {
        return Err(invalid("a trace with a text that is too long"));
    }
    let mut text = vec![0; len as usize];
    from.read_exact(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into())
}
