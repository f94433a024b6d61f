//! Async runtimes in one process with trefoil: smol and async-std. Goroutines call their
//! `block_on`, which polls the reactor or parks by std's `park`; their tasks run on their own
//! threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil_compat_more::{MANY, go_each, run};

const ROUNDS: usize = 3;

#[test]
fn smol_timers_wake_block_on_of_every_goroutine() {
    run(|| {
        go_each(*MANY, |i| {
            let time = Duration::from_millis(1 + i as u64 % 20);
            let start = Instant::now();
            smol::block_on(smol::Timer::after(time));
            assert!(start.elapsed() >= time);
        });
    });
}

#[test]
fn smol_block_on_echoes_over_tcp() {
    use smol::io::{AsyncReadExt, AsyncWriteExt};
    run(|| {
        let listener = smol::block_on(smol::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let addr = listener.local_addr().unwrap();
        let server = trefoil::go(move || {
            smol::block_on(async move {
                for _ in 0..*MANY {
                    let (stream, _) = listener.accept().await.unwrap();
                    smol::spawn(async move {
                        let mut writer = stream.clone();
                        smol::io::copy(stream, &mut writer).await.unwrap();
                    })
                    .detach();
                }
            });
        });
        go_each(*MANY, move |i| {
            smol::block_on(async move {
                let mut stream = smol::net::TcpStream::connect(addr).await.unwrap();
                let mut buf = [0; 8];
                for round in 0..ROUNDS {
                    let sent = (ROUNDS * i + round).to_ne_bytes();
                    stream.write_all(&sent).await.unwrap();
                    stream.read_exact(&mut buf).await.unwrap();
                    assert_eq!(buf, sent);
                }
            });
        });
        server.join().unwrap();
    });
}

#[test]
fn smol_tasks_and_unblock_return_to_the_goroutine_that_waits() {
    run(|| {
        let executor = Arc::new(smol::Executor::new());
        let shared = executor.clone();
        go_each(*MANY, move |i| {
            let task = shared.spawn(async move { smol::unblock(move || 2 * i).await });
            // A goroutine runs the tasks of all goroutines until its own task is done.
            assert_eq!(smol::block_on(shared.run(task)), 2 * i);
        });
        assert!(executor.is_empty());
    });
}

#[test]
fn async_std_timers_wake_block_on_of_every_goroutine() {
    run(|| {
        go_each(*MANY, |i| {
            async_std::task::block_on(async move {
                let time = Duration::from_millis(1 + i as u64 % 20);
                let start = Instant::now();
                async_std::task::sleep(time).await;
                assert!(start.elapsed() >= time);
                let never = async_std::future::pending::<()>();
                async_std::future::timeout(time, never).await.unwrap_err();
            });
        });
    });
}

#[test]
fn async_std_block_on_echoes_over_tcp() {
    use async_std::io::{ReadExt, WriteExt};
    use async_std::net::{TcpListener, TcpStream};
    use async_std::task;
    run(|| {
        let listener = task::block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let addr = listener.local_addr().unwrap();
        let server = trefoil::go(move || {
            task::block_on(async move {
                for _ in 0..*MANY {
                    let (stream, _) = listener.accept().await.unwrap();
                    task::spawn(async move {
                        async_std::io::copy(&mut &stream, &mut &stream).await.unwrap();
                    });
                }
            });
        });
        go_each(*MANY, move |i| {
            task::block_on(async move {
                let mut stream = TcpStream::connect(addr).await.unwrap();
                let mut buf = [0; 8];
                for round in 0..ROUNDS {
                    let sent = (ROUNDS * i + round).to_ne_bytes();
                    stream.write_all(&sent).await.unwrap();
                    stream.read_exact(&mut buf).await.unwrap();
                    assert_eq!(buf, sent);
                }
            });
        });
        server.join().unwrap();
    });
}

#[test]
fn async_std_tasks_and_locks_serve_all_goroutines() {
    run(|| {
        let total = Arc::new(async_std::sync::Mutex::new(0));
        let blocking = Arc::new(AtomicUsize::new(0));
        let (sum, counted) = (total.clone(), blocking.clone());
        go_each(*MANY, move |i| {
            let (sum, counted) = (sum.clone(), counted.clone());
            async_std::task::block_on(async move {
                let add = async_std::task::spawn(async move {
                    let mut sum = sum.lock().await;
                    let before = *sum;
                    async_std::task::yield_now().await;
                    *sum = before + i;
                    i
                });
                assert_eq!(add.await, i);
                async_std::task::spawn_blocking(move || counted.fetch_add(1, SeqCst)).await;
            });
        });
        let total = async_std::task::block_on(async { *total.lock().await });
        assert_eq!((total, blocking.load(SeqCst)), (*MANY * (*MANY - 1) / 2, *MANY));
    });
}
