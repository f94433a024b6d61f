use trefoil::chan::bounded;
use trefoil::select;

fn main() {
    let (tx, rx) = bounded(1);
    select! {
        send(tx, 1) => {}
    }
    let _: (trefoil::chan::Sender<i32>, _) = (tx, rx);
}
