use trefoil::chan::bounded;
use trefoil::select;

fn main() {
    let (_tx, rx) = bounded::<i32>(1);
    select! {
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
        recv(rx) -> _ => {}
    }
}
