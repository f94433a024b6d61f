//! What the goroutines and threads of the scenes do: allocate in every way that programs do, and
//! check the contents.

use crate::block::{Block, random_size};
use crate::rng::Rng;
use crate::watchdog;
use std::collections::HashMap;
use std::fmt::Write;
use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::Duration;
use trefoil::chan::{Receiver, Sender, bounded};

/// Channels among goroutines.
const CHANNELS: usize = 8;
/// Blocks in each channel.
const CAPACITY: usize = 32;
/// Threads started by goroutines that may exist at the same time: each also blocks an M in `join`.
const MAX_THREADS: usize = 4;

/// Channels by which goroutines send blocks to other goroutines and to plain threads.
pub(crate) struct Exchange {
    channels: [(Sender<Block>, Receiver<Block>); CHANNELS],
    plain_threads: Option<PlainThreads>,
    /// The number of live threads that were started by goroutines.
    started_threads: AtomicUsize,
}

/// The senders to two plain threads, one by std's channel and one by trefoil's. `None` ends the
/// thread.
struct PlainThreads {
    by_std: mpsc::SyncSender<Option<Block>>,
    by_trefoil: Sender<Option<Block>>,
}

impl Exchange {
    /// Returns an exchange among goroutines only.
    pub(crate) fn among_goroutines() -> Exchange {
        Exchange {
            channels: std::array::from_fn(|_| bounded(CAPACITY)),
            plain_threads: None,
            started_threads: AtomicUsize::new(0),
        }
    }

    /// Returns an exchange with two plain threads that serve it until `close`.
    pub(crate) fn with_plain_threads(budget: usize) -> Arc<Exchange> {
        let (by_std, std_blocks) = mpsc::sync_channel(CAPACITY);
        let (by_trefoil, trefoil_blocks) = bounded(CAPACITY);
        let exchange = Arc::new(Exchange {
            plain_threads: Some(PlainThreads { by_std, by_trefoil }),
            ..Exchange::among_goroutines()
        });
        let (one, other) = (exchange.clone(), exchange.clone());
        std::thread::spawn(move || one.serve(budget, || std_blocks.recv().ok()?));
        std::thread::spawn(move || other.serve(budget, || trefoil_blocks.recv().ok()?));
        exchange
    }

    /// Ends the plain threads and frees all blocks in the channels. The goroutines have ended.
    pub(crate) fn close(self: Arc<Exchange>) {
        if let Some(threads) = &self.plain_threads {
            threads.by_std.send(None).expect("the thread receives");
            threads.by_trefoil.send(None).expect("the thread receives");
        }
        // Each thread has a reference.
        while Arc::strong_count(&self) > 1 {
            std::thread::sleep(Duration::from_millis(1));
        }
        for (_, blocks) in &self.channels {
            while blocks.try_recv().is_ok() {}
        }
    }

    /// Receives blocks on a plain thread: frees them, or resizes them and sends them back.
    fn serve(&self, budget: usize, next: impl Fn() -> Option<Block>) {
        let mut worker = Worker::new(budget);
        while let Some(mut block) = next() {
            worker.allocate();
            block.check();
            if worker.rng.one_in(2) {
                block.resize(random_size(&mut worker.rng, budget));
                // Freed here if the channel is full.
                let _ = self.channels[worker.rng.below(CHANNELS)].0.try_send(block);
            }
        }
    }
}

/// A seed that no other caller gets.
fn seed() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Relaxed) << 32
}

/// One goroutine or thread that allocates.
pub(crate) struct Worker {
    rng: Rng,
    kept: Vec<Block>,
    kept_bytes: usize,
    /// How many bytes it may keep.
    budget: usize,
}

impl Worker {
    /// Returns a worker that keeps at most `budget` bytes in blocks between its rounds.
    pub(crate) fn new(budget: usize) -> Worker {
        Worker { rng: Rng::new(seed()), kept: Vec::new(), kept_bytes: 0, budget }
    }

    /// Allocates, checks and frees. Works on goroutines and on plain threads.
    pub(crate) fn allocate(&mut self) {
        let rng = &mut self.rng;
        match rng.below(8) {
            0 => vector(rng),
            1 => text(rng),
            2 => map(rng),
            3 => boxes(rng),
            4 => self.resize_kept(),
            5 => unwind(rng, self.budget),
            _ => self.replace_kept(),
        }
        watchdog::progress();
    }

    /// Allocates, and also waits, computes, exchanges blocks, or starts goroutines and threads. For
    /// goroutines.
    pub(crate) fn round(&mut self, exchange: &Arc<Exchange>) {
        for _ in 0..1 + self.rng.below(8) {
            self.allocate();
        }
        match self.rng.below(64) {
            0..=7 => compute(Duration::from_micros(self.rng.below(100) as u64)),
            8..=15 => trefoil::yield_now(),
            16..=23 => trefoil::time::sleep(Duration::from_micros(self.rng.below(2000) as u64)),
            24..=27 => std::thread::sleep(Duration::from_micros(self.rng.below(500) as u64)),
            28..=43 => self.exchange_block(exchange),
            44..=47 => self.send_to_thread(exchange),
            48..=53 => self.start_goroutine(),
            54..=56 => self.panic_in_goroutine(),
            57 if self.rng.one_in(8) => self.start_thread(exchange),
            _ => {}
        }
    }

    fn keep(&mut self, block: Block) {
        self.kept_bytes += block.size();
        self.kept.push(block);
        while self.kept_bytes > self.budget {
            self.drop_kept();
        }
    }

    fn take_kept(&mut self) -> Option<Block> {
        if self.kept.is_empty() {
            return None;
        }
        let block = self.kept.swap_remove(self.rng.below(self.kept.len()));
        self.kept_bytes -= block.size();
        Some(block)
    }

    fn drop_kept(&mut self) {
        drop(self.take_kept());
    }

    /// Frees some blocks and allocates others.
    fn replace_kept(&mut self) {
        for _ in 0..self.rng.below(6) {
            self.drop_kept();
        }
        for _ in 0..1 + self.rng.below(6) {
            let block = Block::random(&mut self.rng, self.budget);
            self.keep(block);
        }
    }

    /// Grows or shrinks a block.
    fn resize_kept(&mut self) {
        if let Some(mut block) = self.take_kept() {
            block.resize(random_size(&mut self.rng, self.budget));
            self.keep(block);
        }
    }

    /// Sends a block to another goroutine and receives one, which it keeps or frees.
    fn exchange_block(&mut self, exchange: &Exchange) {
        let Some(block) = self.take_kept() else { return };
        // A full channel returns the block, which is freed here.
        let _ = exchange.channels[self.rng.below(CHANNELS)].0.try_send(block);
        if let Ok(mut block) = exchange.channels[self.rng.below(CHANNELS)].1.try_recv() {
            if self.rng.one_in(4) {
                block.resize(random_size(&mut self.rng, self.budget));
            }
            self.keep(block);
        }
    }

    /// Sends a block to a plain thread.
    fn send_to_thread(&mut self, exchange: &Exchange) {
        let Some(threads) = &exchange.plain_threads else { return };
        let block = Block::random(&mut self.rng, self.budget);
        // Freed here if the channel is full.
        if self.rng.one_in(2) {
            let _ = threads.by_std.try_send(Some(block));
        } else {
            let _ = threads.by_trefoil.try_send(Some(block));
        }
    }

    /// Starts a goroutine that resizes and frees a block of this one, and returns a block that is
    /// freed here.
    fn start_goroutine(&mut self) {
        let (mut block, budget) = (Block::random(&mut self.rng, self.budget), self.budget);
        let size = random_size(&mut self.rng, budget);
        let child = trefoil::go(move || {
            block.resize(size);
            drop(block);
            let mut worker = Worker::new(budget);
            worker.allocate();
            worker.take_kept()
        });
        drop(child.join().expect("no panic"));
    }

    /// Starts a goroutine that panics with a block as its payload, which is freed here.
    fn panic_in_goroutine(&mut self) {
        let budget = self.budget;
        let child = trefoil::go(move || {
            let mut worker = Worker::new(budget);
            worker.replace_kept();
            let block = worker.take_kept();
            resume_unwind(Box::new(block));
        });
        let payload = child.join().expect_err("the goroutine panics");
        payload.downcast::<Option<Block>>().expect("a block as the payload");
    }

    /// Starts an OS thread that allocates, and waits for it.
    fn start_thread(&mut self, exchange: &Exchange) {
        let budget = self.budget;
        if exchange.started_threads.fetch_add(1, Relaxed) < MAX_THREADS {
            let thread = std::thread::spawn(move || {
                let mut worker = Worker::new(budget);
                (0..20).for_each(|_| worker.allocate());
                worker.take_kept()
            });
            drop(thread.join().expect("no panic"));
        }
        exchange.started_threads.fetch_sub(1, Relaxed);
    }
}

/// Grows, shrinks and checks a vector.
fn vector(rng: &mut Rng) {
    let (start, len) = (rng.next(), 1 + rng.below(2000));
    let mut numbers: Vec<u64> = Vec::new();
    for i in 0..len as u64 {
        numbers.push(start.wrapping_mul(i));
    }
    numbers.truncate(1 + len / 3);
    numbers.shrink_to_fit();
    let intact = numbers.iter().zip(0..).all(|(&n, i)| n == start.wrapping_mul(i));
    assert!(intact, "a vector's contents changed");
}

/// Grows a string by formatting.
fn text(rng: &mut Rng) {
    let (number, lines) = (rng.next(), rng.below(40));
    let line = format!("{number:>24}\n");
    let mut all = String::new();
    for _ in 0..lines {
        write!(all, "{number:>24}").expect("a String takes everything");
        all.push('\n');
    }
    assert_eq!(all.len(), lines * line.len());
    assert!(all.lines().all(|l| l == line.trim_end_matches('\n')), "a string's contents changed");
}

/// Fills a map, which is rehashed as it grows.
fn map(rng: &mut Rng) {
    let (start, len) = (rng.next() >> 1, 1 + rng.below(200) as u64);
    let mut map = HashMap::new();
    for i in 0..len {
        map.insert(start + i, (start + i).to_string());
    }
    for i in (0..len).step_by(2) {
        assert_eq!(map.remove(&(start + i)), Some((start + i).to_string()));
    }
    assert!(map.iter().all(|(key, value)| key.to_string() == *value), "a map's contents changed");
}

/// Allocates boxes of two sizes and frees them in another order.
fn boxes(rng: &mut Rng) {
    let start = rng.next();
    let mut small: Vec<Box<u64>> = (0..50).map(|i| Box::new(start ^ i)).collect();
    let large: Vec<Box<[u64; 40]>> = (0..20).map(|i| Box::new([start ^ i; 40])).collect();
    for i in (0..50).rev().step_by(3) {
        assert_eq!(*small.swap_remove(i), start ^ i as u64, "a box's contents changed");
    }
    drop(small);
    for (i, array) in (0..).zip(large) {
        assert!(array.iter().all(|&word| word == start ^ i), "a box's contents changed");
    }
}

/// Frees blocks by unwinding.
fn unwind(rng: &mut Rng, budget: usize) {
    fn recurse(depth: usize, rng: &mut Rng, largest: usize) {
        let block = Block::random(rng, largest);
        if depth == 0 {
            resume_unwind(Box::new(block));
        }
        recurse(depth - 1, rng, largest);
        block.check();
    }
    let depth = rng.below(6);
    let caught = catch_unwind(AssertUnwindSafe(|| recurse(depth, rng, budget.min(4096))));
    caught.expect_err("`recurse` panics").downcast::<Block>().expect("a block as the payload");
}

/// Keeps the CPU busy for about `time`, without any call in the loop.
fn compute(time: Duration) {
    let mut x = time.as_nanos() as u64;
    for _ in 0..time.as_nanos() {
        x = black_box(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    }
}
