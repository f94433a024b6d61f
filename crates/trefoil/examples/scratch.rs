//! scratch
use trefoil::*;
fn main() {
    let n = run(|| {
        let hs: Vec<_> = (0..100_000u64).map(|i| go(move || i)).collect();
        hs.into_iter().map(|h| h.join().unwrap()).sum::<u64>()
    });
    println!("{n}");
    let t = std::time::Instant::now();
    run(|| {
        let t = std::time::Instant::now();
        let rounds = 2000;
        for _ in 0..rounds {
            let hs: Vec<_> = (0..1000u64).map(|i| go(move || i)).collect();
            for h in hs { h.join().unwrap(); }
        }
        println!("spawn+join {} ns", t.elapsed().as_nanos() / (rounds * 1000));
        let t = std::time::Instant::now();
        let hs: Vec<_> = (0..4).map(|_| go(|| for _ in 0..2_000_000 { yield_now() })).collect();
        for h in hs { h.join().unwrap(); }
        println!("yield {} ns", t.elapsed().as_nanos() / 8_000_000);
        fn fib(n: u32) -> u64 { if n < 2 { return n as u64 } let l = go(move || fib(n - 1)); let r = fib(n - 2); l.join().unwrap() + r }
        let t = std::time::Instant::now();
        println!("fib {}", fib(27));
        println!("fib {} ns", t.elapsed().as_nanos() / 832_039);
    });
    println!("{:?}", t.elapsed());
}
