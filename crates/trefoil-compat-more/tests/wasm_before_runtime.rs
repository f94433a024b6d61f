//! wasmtime's engine is created before the first runtime of the process, so trefoil's handler for
//! SIGSEGV is installed after wasmtime's. A file of its own, because handlers belong to the
//! process.

// This file uses only a part of the module.
#[allow(dead_code)]
mod wasm_module;

use trefoil_compat_more::{MANY, go_each, run};
use wasm_module::{compile, config, trap_in_every_way};

#[test]
fn wasmtime_traps_are_errors_if_the_engine_is_older_than_the_runtime() {
    let module = compile(&config());
    run(move || {
        go_each(*MANY, move |i| trap_in_every_way(&module, i));
    });
}
