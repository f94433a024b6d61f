#[trefoil::main(workers = 4)]
fn main() {}
