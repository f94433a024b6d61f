#[trefoil::main(tokio)]
fn main() {}
