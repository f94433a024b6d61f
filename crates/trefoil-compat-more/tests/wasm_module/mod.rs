//! A WebAssembly module that computes, calls the host and traps, and checks that two test files
//! share.

use std::time::Duration;
use wasmtime::{Config, Engine, Instance, Linker, Module, Store, Trap, TypedFunc};
use wasmtime::{WasmParams, WasmResults};

/// The part of a goroutine's stack that WebAssembly may use; the rest is for the host.
const WASM_STACK_BYTES: usize = 128 << 10;

pub(crate) const CODE: &str = r#"
(module
  (import "host" "pause" (func $pause (param i32)))
  (memory (export "memory") 1 2)
  (func $fib (export "fib") (param i32) (result i64)
    (if (result i64) (i32.lt_u (local.get 0) (i32.const 2))
      (then (i64.extend_i32_u (local.get 0)))
      (else (i64.add
        (call $fib (i32.sub (local.get 0) (i32.const 1)))
        (call $fib (i32.sub (local.get 0) (i32.const 2)))))))
  (func (export "sum_with_pauses") (param i32) (result i32)
    (local $sum i32)
    (loop $again
      (call $pause (local.get 0))
      (local.set $sum (i32.add (local.get $sum) (local.get 0)))
      (local.set 0 (i32.sub (local.get 0) (i32.const 1)))
      (br_if $again (local.get 0)))
    (local.get $sum))
  (func (export "unreachable") (unreachable))
  (func (export "load") (param i32) (result i32) (i32.load (local.get 0)))
  (func (export "divide") (param i32 i32) (result i32) (i32.div_s (local.get 0) (local.get 1)))
  (func $recurse (export "recurse") (param i32) (result i32)
    (i32.add (i32.const 1) (call $recurse (local.get 0))))
  (func (export "spin") (loop $again (br $again)))
)"#;

/// Returns the configuration of every engine.
pub(crate) fn config() -> Config {
    let mut config = Config::new();
    config.max_wasm_stack(WASM_STACK_BYTES);
    config
}

/// Compiles the module with an engine of its own.
pub(crate) fn compile(config: &Config) -> Module {
    Module::new(&Engine::new(config).unwrap(), CODE).unwrap()
}

pub(crate) fn instantiate(module: &Module) -> (Store<()>, Instance) {
    let mut store = Store::new(module.engine(), ());
    let mut linker = Linker::new(module.engine());
    // The goroutine may continue on another thread, between two frames of WebAssembly.
    linker
        .func_wrap("host", "pause", |n: i32| {
            if n % 4 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            } else {
                trefoil::yield_now();
            }
        })
        .unwrap();
    let instance = linker.instantiate(&mut store, module).unwrap();
    (store, instance)
}

pub(crate) fn function<P: WasmParams, R: WasmResults>(
    store: &mut Store<()>,
    instance: &Instance,
    name: &str,
) -> TypedFunc<P, R> {
    instance.get_typed_func(store, name).unwrap()
}

/// Makes an instance trap in four ways, and checks after each trap that it still computes.
pub(crate) fn trap_in_every_way(module: &Module, i: usize) {
    const PAGE_BYTES: i32 = 64 << 10;
    let (mut store, instance) = instantiate(module);
    let unreachable = function::<(), ()>(&mut store, &instance, "unreachable");
    let load = function::<i32, i32>(&mut store, &instance, "load");
    let divide = function::<(i32, i32), i32>(&mut store, &instance, "divide");
    let recurse = function::<i32, i32>(&mut store, &instance, "recurse");
    let sum = function::<i32, i32>(&mut store, &instance, "sum_with_pauses");
    for n in 0..4 {
        let (found, expected) = match (i + n) % 4 {
            0 => (unreachable.call(&mut store, ()).err(), Trap::UnreachableCodeReached),
            1 => {
                let outside = PAGE_BYTES + i as i32 * 100_000;
                (load.call(&mut store, outside).err(), Trap::MemoryOutOfBounds)
            }
            2 => (divide.call(&mut store, (i as i32, 0)).err(), Trap::IntegerDivisionByZero),
            _ => (recurse.call(&mut store, 0).err(), Trap::StackOverflow),
        };
        assert_eq!(found.expect("a trap").downcast_ref(), Some(&expected));
        assert_eq!(load.call(&mut store, PAGE_BYTES - 4).unwrap(), 0);
        assert_eq!(divide.call(&mut store, (10, 3)).unwrap(), 3);
        assert_eq!(sum.call(&mut store, 3).unwrap(), 6);
    }
}
