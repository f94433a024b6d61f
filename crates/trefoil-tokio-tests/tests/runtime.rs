//! tokio's own functions on a runtime whose threads are goroutines.

use std::cell::Cell;
use std::io::ErrorKind;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::sync::{Notify, Semaphore, broadcast, mpsc, oneshot, watch};
use trefoil::tokio::Runtime;
use trefoil_tokio_tests::{spin, within};

/// Returns how many threads of tokio's are OS threads.
fn os_threads_of_tokio() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok())
        .filter(|name| name.starts_with("tokio-"))
        .count()
}

#[trefoil::test(tokio)]
async fn tasks_and_blocking_closures_run_on_goroutines() {
    let tasks: Vec<_> = (0..64).map(|_| tokio::spawn(async { trefoil::id() })).collect();
    for task in tasks {
        assert_ne!(within(task).await.unwrap(), 0);
    }
    assert_ne!(within(tokio::task::spawn_blocking(trefoil::id)).await.unwrap(), 0);
    assert_eq!(std::thread::spawn(trefoil::id).join().unwrap(), 0);
    let of_task = tokio::spawn(async { std::thread::spawn(trefoil::id).join().unwrap() });
    assert_eq!(within(of_task).await.unwrap(), 0, "a thread that a task starts is an OS thread");
    assert_eq!(os_threads_of_tokio(), 0);
}

#[trefoil::test(tokio, procs = 2, workers = 64)]
async fn idle_workers_and_the_driver_hold_no_threads() {
    let tasks: Vec<_> = (0..200)
        .map(|_| tokio::spawn(async { tokio::time::sleep(Duration::from_millis(50)).await }))
        .collect();
    for task in tasks {
        within(task).await.unwrap();
    }
    // 64 workers wait, one of them in the driver.
    let threads = trefoil::debug::stats().threads;
    assert!(threads < 16, "{threads} threads");
}

#[trefoil::test(tokio, workers = 3)]
async fn the_option_sets_the_number_of_workers() {
    assert_eq!(tokio::runtime::Handle::current().metrics().num_workers(), 3);
}

#[trefoil::test(tokio, procs = 5)]
async fn there_are_eight_workers_per_p_by_default() {
    assert_eq!(tokio::runtime::Handle::current().metrics().num_workers(), 40);
}

#[trefoil::test(tokio)]
async fn a_test_may_return_an_error_type() -> Result<(), Box<dyn std::error::Error>> {
    tokio::task::yield_now().await;
    Ok(())
}

#[test]
fn a_runtime_is_made_on_goroutines_only() {
    let error = Runtime::new().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("trefoil::run"), "{error}");
}

#[test]
fn settings_that_are_out_of_range_are_errors() {
    trefoil::run(|| {
        for builder in [
            Runtime::builder().workers(0),
            Runtime::builder().max_blocking_threads(0),
            Runtime::builder().stack_size(0),
            Runtime::builder().stack_size(2 << 30),
        ] {
            assert_eq!(builder.build().unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    });
}

#[test]
fn the_end_of_a_runtime_leaves_no_goroutine() {
    trefoil::run(|| {
        let before = trefoil::num_goroutines();
        for _ in 0..5 {
            let rt = Runtime::builder().workers(8).build().unwrap();
            let blocking = rt.spawn_blocking(|| std::thread::sleep(Duration::from_millis(5)));
            rt.block_on(async { tokio::spawn(async { 1 }).await.unwrap() });
            drop(blocking);
            drop(rt);
            assert_eq!(trefoil::num_goroutines(), before);
        }
        let rt = Runtime::new().unwrap();
        rt.spawn_blocking(|| std::thread::sleep(Duration::from_secs(60)));
        let begin = Instant::now();
        rt.shutdown_timeout(Duration::from_millis(5));
        assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
        Runtime::new().unwrap().shutdown_background();
    });
}

#[test]
fn a_runtime_that_outlives_its_goroutines_can_be_dropped() {
    let rt = trefoil::run(|| {
        let rt = Runtime::builder().workers(2).build().unwrap();
        rt.spawn(std::future::pending::<()>());
        rt
    });
    drop(rt);
}

#[test]
fn several_goroutines_and_plain_threads_block_on_one_runtime() {
    trefoil::run(|| {
        let rt = Runtime::new().unwrap();
        let wait = |n: u64| {
            let handle = rt.handle().clone();
            move || {
                handle.block_on(async {
                    tokio::time::sleep(Duration::from_millis(n)).await;
                    n
                })
            }
        };
        let goroutines: Vec<_> = (0..20).map(|n| trefoil::go(wait(n))).collect();
        let threads: Vec<_> = (0..3).map(|n| std::thread::spawn(wait(n))).collect();
        assert_eq!(goroutines.into_iter().map(|g| g.join().unwrap()).sum::<u64>(), 190);
        assert_eq!(threads.into_iter().map(|t| t.join().unwrap()).sum::<u64>(), 3);
        let of_plain_thread = std::thread::spawn({
            let handle = rt.handle().clone();
            move || handle.block_on(handle.spawn_blocking(|| 7)).unwrap()
        });
        assert_eq!(of_plain_thread.join().unwrap(), 7);
    });
}

#[trefoil::test(tokio, procs = 2)]
async fn tasks_that_block_run_at_the_same_time() {
    // Each waits for all others. On two threads they would wait for ever.
    let barrier = Arc::new(Barrier::new(24));
    let tasks: Vec<_> = (0..24)
        .map(|_| {
            let barrier = barrier.clone();
            tokio::spawn(async move { barrier.wait().is_leader() })
        })
        .collect();
    let mut leaders = 0;
    for task in tasks {
        leaders += usize::from(within(task).await.unwrap());
    }
    assert_eq!(leaders, 1);
}

#[trefoil::test(tokio, procs = 2)]
async fn a_ticker_continues_beside_tasks_that_compute() {
    let is_over = Arc::new(AtomicBool::new(false));
    let hogs: Vec<_> = (0..8)
        .map(|_| {
            let is_over = is_over.clone();
            tokio::spawn(async move {
                let limit = Instant::now() + Duration::from_secs(30);
                while !is_over.load(SeqCst) && Instant::now() < limit {
                    spin(Duration::from_micros(10));
                }
            })
        })
        .collect();
    let mut ticker = tokio::time::interval(Duration::from_millis(5));
    for _ in 0..20 {
        within(ticker.tick()).await;
    }
    assert!(hogs.iter().all(|hog| !hog.is_finished()));
    is_over.store(true, SeqCst);
    for hog in hogs {
        within(hog).await.unwrap();
    }
}

#[trefoil::test(tokio, procs = 2)]
async fn a_std_mutex_held_over_a_sleep_stalls_only_its_waiters() {
    let (mutex, begun) = (Arc::new(Mutex::new(0)), Arc::new(AtomicUsize::new(0)));
    let may_end = Arc::new(AtomicBool::new(false));
    let limit = Instant::now() + Duration::from_secs(60);
    let tasks: Vec<_> = (0..10)
        .map(|_| {
            let (mutex, begun, may_end) = (mutex.clone(), begun.clone(), may_end.clone());
            tokio::spawn(async move {
                begun.fetch_add(1, SeqCst);
                let mut n = mutex.lock().unwrap();
                while !may_end.load(SeqCst) && Instant::now() < limit {
                    std::thread::sleep(Duration::from_millis(1));
                }
                *n += 1;
            })
        })
        .collect();
    let sleep = || tokio::time::sleep(Duration::from_millis(1));
    // One holds the mutex, and the others wait for it. On two threads, only two would have begun.
    within(async {
        while begun.load(SeqCst) < 10 || mutex.try_lock().is_ok() {
            sleep().await;
        }
    })
    .await;
    within(tokio::spawn(async move { sleep().await })).await.unwrap();
    assert!(tasks.iter().all(|task| !task.is_finished()));
    may_end.store(true, SeqCst);
    for task in tasks {
        within(task).await.unwrap();
    }
    assert_eq!(*mutex.lock().unwrap(), 10);
}

#[trefoil::test(tokio)]
async fn a_task_waits_for_goroutines_and_channels_of_trefoil() {
    let (sender, receiver) = trefoil::chan::bounded(0);
    let goroutine = trefoil::go(move || receiver.iter().sum::<u32>());
    let task = tokio::spawn(async move {
        for n in 0..100 {
            sender.send(n).unwrap();
        }
        drop(sender);
        goroutine.join().unwrap()
    });
    assert_eq!(within(task).await.unwrap(), 4950);
}

#[trefoil::test(tokio)]
async fn spawn_blocking_runs_many_closures_at_once() {
    let barrier = Arc::new(Barrier::new(100));
    let closures: Vec<_> = (0..100)
        .map(|n| {
            let barrier = barrier.clone();
            tokio::task::spawn_blocking(move || {
                barrier.wait();
                n
            })
        })
        .collect();
    let mut sum = 0;
    for closure in closures {
        sum += within(closure).await.unwrap();
    }
    assert_eq!(sum, 4950);
    assert_eq!(os_threads_of_tokio(), 0);
    let panic = within(tokio::task::spawn_blocking(|| panic!("of the closure"))).await.unwrap_err();
    assert!(panic.is_panic());
}

#[trefoil::test(tokio, workers = 2)]
async fn block_in_place_hands_the_worker_over() {
    // Two workers alone would wait for ever.
    let barrier = Arc::new(Barrier::new(8));
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let barrier = barrier.clone();
            tokio::spawn(async move {
                tokio::task::block_in_place(|| barrier.wait());
                trefoil::id()
            })
        })
        .collect();
    for task in tasks {
        assert_ne!(within(task).await.unwrap(), 0);
    }
    let nested = tokio::task::block_in_place(|| {
        let spawned = async { tokio::spawn(async { 5 }).await.unwrap() };
        tokio::runtime::Handle::current().block_on(spawned)
    });
    assert_eq!(nested, 5);
}

#[trefoil::test(tokio)]
async fn a_local_set_runs_futures_that_are_not_send() {
    let set = tokio::task::LocalSet::new();
    let sum = Rc::new(Cell::new(0));
    let of_tasks = sum.clone();
    let all = set.run_until(async move {
        let tasks: Vec<_> = (0..10)
            .map(|n| {
                let sum = of_tasks.clone();
                tokio::task::spawn_local(async move {
                    tokio::time::sleep(Duration::from_millis(n % 3)).await;
                    sum.set(sum.get() + n);
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
    });
    within(all).await;
    assert_eq!(sum.get(), 45);
}

#[trefoil::test(tokio)]
async fn panics_and_aborts_of_tasks_come_out_of_their_handles() {
    let panic = within(tokio::spawn(async { panic!("of the task") })).await.unwrap_err();
    assert_eq!(panic.into_panic().downcast_ref(), Some(&"of the task"));
    let endless = tokio::spawn(std::future::pending::<()>());
    endless.abort();
    assert!(within(endless).await.unwrap_err().is_cancelled());
}

#[trefoil::test(tokio)]
async fn channels_and_locks_of_tokio_work() {
    let (sender, mut receiver) = mpsc::channel(4);
    let (first, answer) = oneshot::channel();
    let (news, mut reader) = broadcast::channel(16);
    let (state, mut watcher) = watch::channel(0);
    let permits = Arc::new(Semaphore::new(2));
    let mutex = Arc::new(tokio::sync::Mutex::new(0));
    let notify = Arc::new(Notify::new());
    let tasks: Vec<_> = (0..20u64)
        .map(|n| {
            let (sender, permits, mutex) = (sender.clone(), permits.clone(), mutex.clone());
            tokio::spawn(async move {
                let _permit = permits.acquire_owned().await.unwrap();
                *mutex.lock().await += n;
                sender.send(n).await.unwrap();
            })
        })
        .collect();
    drop(sender);
    let mut sum = 0;
    while let Some(n) = within(receiver.recv()).await {
        sum += n;
    }
    for task in tasks {
        within(task).await.unwrap();
    }
    assert_eq!((sum, *mutex.lock().await), (190, 190));
    let notified = notify.clone();
    let waits = tokio::spawn(async move { notified.notified().await });
    tokio::spawn(async move {
        first.send(1).unwrap();
        news.send(2).unwrap();
        state.send(3).unwrap();
        notify.notify_one();
    });
    assert_eq!(within(answer).await.unwrap(), 1);
    assert_eq!(within(reader.recv()).await.unwrap(), 2);
    within(watcher.wait_for(|&n| n == 3)).await.unwrap();
    within(waits).await.unwrap();
}

#[trefoil::test(tokio)]
async fn select_and_timeouts_take_the_first_that_is_ready() {
    let (sender, mut receiver) = mpsc::unbounded_channel();
    for round in 0..50 {
        let sender = sender.clone();
        tokio::spawn(async move {
            if round % 2 == 0 {
                sender.send(round).unwrap();
            }
        });
        let limit = Duration::from_millis(if round % 2 == 0 { 10_000 } else { 1 });
        tokio::select! {
            got = receiver.recv() => assert_eq!(got, Some(round)),
            () = tokio::time::sleep(limit) => assert_eq!(round % 2, 1),
        }
    }
    let begin = Instant::now();
    let late = tokio::time::timeout(Duration::from_millis(10), std::future::pending::<()>()).await;
    assert!(late.is_err() && begin.elapsed() >= Duration::from_millis(10));
}

#[trefoil::test(tokio)]
async fn files_are_read_and_written() {
    let file = std::env::temp_dir().join(format!("trefoil-tokio-{}", std::process::id()));
    within(tokio::fs::write(&file, b"line one\nline two\n")).await.unwrap();
    let open = within(tokio::fs::File::open(&file)).await.unwrap();
    let mut lines = BufReader::new(open).lines();
    assert_eq!(within(lines.next_line()).await.unwrap().as_deref(), Some("line one"));
    assert_eq!(within(lines.next_line()).await.unwrap().as_deref(), Some("line two"));
    assert_eq!(within(tokio::fs::metadata(&file)).await.unwrap().len(), 18);
    within(tokio::fs::remove_file(&file)).await.unwrap();
}

#[trefoil::test(tokio)]
async fn child_processes_are_waited_for() {
    let output = within(tokio::process::Command::new("echo").arg("hello").output()).await.unwrap();
    assert_eq!(output.stdout, b"hello\n");
    let mut cat = tokio::process::Command::new("cat")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = cat.stdin.take().unwrap();
    within(input.write_all(b"through a pipe")).await.unwrap();
    drop(input);
    let mut text = String::new();
    within(cat.stdout.take().unwrap().read_to_string(&mut text)).await.unwrap();
    assert_eq!(text, "through a pipe");
    assert!(within(cat.wait()).await.unwrap().success());
    let mut sleeper = tokio::process::Command::new("sleep").arg("60").spawn().unwrap();
    within(sleeper.kill()).await.unwrap();
}

#[trefoil::test(tokio)]
async fn signals_reach_their_streams() {
    use tokio::signal::unix::{SignalKind, signal};
    let mut signals = signal(SignalKind::user_defined1()).unwrap();
    let task = tokio::spawn(async move { signals.recv().await });
    // SAFETY: the process signals itself, and has a handler for it.
    unsafe { libc::kill(std::process::id() as i32, libc::SIGUSR1) };
    assert_eq!(within(task).await.unwrap(), Some(()));
}

#[trefoil::test(tokio)]
async fn sockets_carry_bytes_both_ways() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                tokio::io::copy(&mut read, &mut write).await.unwrap();
            });
        }
    });
    let clients: Vec<_> = (0..20u8)
        .map(|n| {
            tokio::spawn(async move {
                let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
                for _ in 0..50 {
                    stream.write_all(&[n; 100]).await.unwrap();
                    let mut back = [0; 100];
                    stream.read_exact(&mut back).await.unwrap();
                    assert_eq!(back, [n; 100]);
                }
            })
        })
        .collect();
    for client in clients {
        within(client).await.unwrap();
    }
}

#[trefoil::test(tokio)]
async fn thread_locals_of_a_worker_stay_with_it() {
    thread_local!(static WORKER: Cell<u64> = const { Cell::new(0) });
    let mismatches = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..100)
        .map(|_| {
            let mismatches = mismatches.clone();
            tokio::spawn(async move {
                for _ in 0..20 {
                    let own = trefoil::id();
                    if WORKER.get() != 0 && WORKER.get() != own {
                        mismatches.fetch_add(1, SeqCst);
                    }
                    WORKER.set(own);
                    std::thread::yield_now();
                    if WORKER.get() != own {
                        mismatches.fetch_add(1, SeqCst);
                    }
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    for task in tasks {
        within(task).await.unwrap();
    }
    assert_eq!(mismatches.load(SeqCst), 0);
}
