//! The messages of the compiler for wrong uses of `#[trefoil::main]`.

#[test]
fn errors_name_the_word_to_change() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/ui/main_async.rs");
    cases.compile_fail("tests/ui/main_tokio_not_async.rs");
    cases.compile_fail("tests/ui/main_workers.rs");
    if cfg!(not(feature = "tokio")) {
        cases.compile_fail("tests/ui/main_tokio_without_feature.rs");
    }
}
