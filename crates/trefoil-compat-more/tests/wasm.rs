//! wasmtime: code that is compiled at run time and whose traps are signals. wasmtime installs its
//! handlers for SIGSEGV, SIGILL and SIGFPE when the first engine is created: here always after
//! trefoil's, because every engine is created on a goroutine. `wasm_before_runtime.rs` tests the
//! other order.
//!
//! The handlers take a lock of std, which a goroutine holds while it adds or removes a module. So
//! tests that trap and tests that compile do not run at the same time, except for one test that
//! does both.

mod wasm_module;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use trefoil::JoinHandle;
use trefoil_compat_more::{MANY, PROCS, assert_few_threads, go_each, join_all, run, wait_until};
use wasm_module::{compile, config, function, instantiate, trap_in_every_way};
use wasmtime::{Engine, Instance, Module, Store, Trap};

/// Cranelift in a debug build needs more than the other tests.
const COMPILER_STACK_BYTES: usize = 4 << 20;

/// Locked by the test that runs: see the head of the file.
static TURN: Mutex<()> = Mutex::new(());

/// Starts a goroutine that compiles, calls and drops a module of its own.
fn compile_one(engine: &Engine, i: usize) -> JoinHandle<()> {
    let engine = engine.clone();
    let text = format!("(module (func (export \"f\") (result i32) (i32.const {i})))");
    let run = move || {
        let module = Module::new(&engine, text).unwrap();
        let mut store = Store::new(&engine, ());
        let instance = Instance::new(&mut store, &module, &[]).unwrap();
        let f = function::<(), i32>(&mut store, &instance, "f");
        assert_eq!(f.call(&mut store, ()).unwrap(), i as i32);
    };
    trefoil::Builder::new().stack_size(COMPILER_STACK_BYTES).go(run).unwrap()
}

#[test]
fn wasmtime_instances_compute_and_call_a_host_function_that_parks() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    run(|| {
        let module = compile(&config());
        go_each(*MANY, move |i| {
            let (mut store, instance) = instantiate(&module);
            let fib = function::<i32, i64>(&mut store, &instance, "fib");
            let sum = function::<i32, i32>(&mut store, &instance, "sum_with_pauses");
            assert_eq!(fib.call(&mut store, 15).unwrap(), 610);
            let n = 1 + i as i32 % 10;
            assert_eq!(sum.call(&mut store, n).unwrap(), n * (n + 1) / 2);
        });
        assert_few_threads();
    });
}

#[test]
fn wasmtime_modules_are_compiled_on_goroutines() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    run(|| {
        let engine = Engine::new(&config()).unwrap();
        join_all((0..*MANY / 4).map(|i| compile_one(&engine, i)).collect());
    });
}

#[test]
fn wasmtime_traps_are_errors_of_the_goroutine_that_trapped() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    run(|| {
        let module = compile(&config());
        go_each(*MANY, move |i| trap_in_every_way(&module, i));
        assert_few_threads();
    });
}

/// The unlock in the handler wakes a goroutine that waits for the write lock.
#[test]
fn wasmtime_traps_are_errors_while_other_goroutines_compile() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    run(|| {
        let module = compile(&config());
        let (engine, done) = (module.engine().clone(), Arc::new(AtomicBool::new(false)));
        let compile_until_done = |done: Arc<AtomicBool>| {
            let engine = engine.clone();
            trefoil::go(move || {
                while !done.load(SeqCst) {
                    compile_one(&engine, 1).join().unwrap();
                }
            })
        };
        let compiling: Vec<_> = (0..*MANY / 4).map(|_| compile_until_done(done.clone())).collect();
        go_each(*MANY, move |i| trap_in_every_way(&module, i));
        done.store(true, SeqCst);
        join_all(compiling);
    });
}

/// Without preemption of compiled code, the goroutine that advances the epoch would never run:
/// there are more endless loops than Ps.
#[test]
fn wasmtime_endless_loops_are_preempted_until_the_epoch_ends_them() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    run(|| {
        let module = compile(config().epoch_interruption(true));
        let started = Arc::new(AtomicUsize::new(0));
        let spin = |module: Module, started: Arc<AtomicUsize>| {
            trefoil::go(move || {
                let (mut store, instance) = instantiate(&module);
                store.set_epoch_deadline(1);
                let spin = function::<(), ()>(&mut store, &instance, "spin");
                started.fetch_add(1, SeqCst);
                let error = spin.call(&mut store, ()).unwrap_err();
                assert_eq!(error.downcast_ref(), Some(&Trap::Interrupt));
            })
        };
        let spinning: Vec<_> =
            (0..2 * PROCS).map(|_| spin(module.clone(), started.clone())).collect();
        wait_until("all loops", || started.load(SeqCst) == 2 * PROCS);
        std::thread::sleep(Duration::from_millis(50));
        module.engine().increment_epoch();
        join_all(spinning);
    });
}
