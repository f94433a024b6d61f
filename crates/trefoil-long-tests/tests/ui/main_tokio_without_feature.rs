#[trefoil::main(tokio)]
async fn main() {}
