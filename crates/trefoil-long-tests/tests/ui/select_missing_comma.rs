use trefoil::chan::bounded;
use trefoil::select;

fn main() {
    let (tx, rx) = bounded(1);
    select! {
        recv(rx) -> v => drop(v)
        send(tx, 1) -> r => drop(r),
    }
    let _: (trefoil::chan::Sender<i32>, _) = (tx, rx);
}
