//! The messages of the compiler for wrong uses of trefoil's macros.

#[test]
fn errors_of_macros_name_the_word_to_change() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/ui/main_*.rs");
    cases.compile_fail("tests/ui/select_*.rs");
}
