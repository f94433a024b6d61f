#[trefoil::main]
async fn main() {}
