//! Each function that allocates ends the process if the runtime calls it while it holds a P.

#[allow(dead_code, unreachable_pub)]
#[path = "../../../../trefoil-base/src/sys/test_child.rs"]
mod test_child;

use self::test_child::this_program;
use crate::sched::Rt;
use std::ffi::c_void;
use std::os::unix::process::ExitStatusExt;
use std::ptr::null_mut;

/// Set in the child: the name of the function that it calls.
const FUNCTION: &str = "TREFOIL_TEST_ALLOCATES_BY";

/// Calls the function of this name.
fn allocate_by(function: &str) -> *mut c_void {
    // SAFETY: allocations. The program that calls them ends.
    unsafe {
        match function {
            "malloc" => super::malloc(100),
            "calloc" => super::calloc(10, 10),
            "realloc" => super::realloc(null_mut(), 100),
            "memalign" => super::memalign(64, 100),
            "aligned_alloc" => super::aligned_alloc(64, 128),
            "posix_memalign" => {
                let mut block = null_mut();
                super::posix_memalign(&raw mut block, 64, 100);
                block
            }
            "valloc" => super::valloc(100),
            "pvalloc" => super::pvalloc(100),
            _ => unreachable!("no such function"),
        }
    }
}

#[test]
fn no_function_allocates_while_the_runtime_holds_a_p() {
    if let Ok(function) = std::env::var(FUNCTION) {
        crate::run(|| {
            let rt = Rt::enter().expect("on a goroutine");
            let block = allocate_by(&function);
            rt.leave();
            println!("{function} has returned {block:?}");
        });
        return;
    }
    let functions = [
        "malloc",
        "calloc",
        "realloc",
        "memalign",
        "aligned_alloc",
        "posix_memalign",
        "valloc",
        "pvalloc",
    ];
    for function in functions {
        let test = "interpose::malloc::tests::no_function_allocates_while_the_runtime_holds_a_p";
        let out = this_program()
            .args(["--exact", test, "--nocapture"])
            .env(FUNCTION, function)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.signal(), Some(libc::SIGABRT), "{function}: {out:?}");
        assert!(text.contains("the runtime allocates while it holds a P"), "{function}: {text}");
    }
}
