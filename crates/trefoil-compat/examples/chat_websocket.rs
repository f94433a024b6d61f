//! A chat over WebSockets (tungstenite): a client's message is sent to all other clients.
//!
//! ```sh
//! cargo run --release --example chat_websocket 127.0.0.1:9001
//! ```
//! Each client has two goroutines: one reads, one writes the messages of the others.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Duration;
use trefoil::chan::{self, Sender};
use trefoil::go;
use trefoil::net::{TcpListener, TcpStream};
use trefoil::sync::Mutex;
use tungstenite::protocol::Role;
use tungstenite::{Message, WebSocket};

/// Messages that may wait for a client. A client that is slower is removed from the room.
const MAX_WAITING: usize = 256;

/// A connection that two goroutines share. tungstenite writes whole frames, so it is enough to do
/// one write at a time.
#[derive(Clone)]
struct Shared {
    stream: Arc<TcpStream>,
    writing: Arc<Mutex<()>>,
}

impl Read for Shared {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        (&*self.stream).read(buf)
    }
}

impl Write for Shared {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let _guard = self.writing.lock();
        (&*self.stream).write_all(buf)?;
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Clone, Default)]
struct Room(Arc<Mutex<HashMap<u64, Sender<Message>>>>);

impl Room {
    fn say(&self, from: u64, text: &str) {
        let text = format!("{from}: {text}");
        self.0
            .lock()
            .retain(|&id, tx| id == from || tx.try_send(Message::text(text.clone())).is_ok());
    }
}

fn serve(id: u64, stream: TcpStream, room: &Room) -> tungstenite::Result<()> {
    let shared = Shared { stream: Arc::new(stream), writing: Arc::default() };
    let Ok(mut reads) = tungstenite::accept(shared.clone()) else { return Ok(()) };
    let (tx, rx) = chan::bounded(MAX_WAITING);
    // Under the lock: a client that has received this message is in the room.
    let mut members = room.0.lock();
    let _ = tx.try_send(Message::text(format!("you are {id}")));
    members.insert(id, tx);
    drop(members);
    let stream = shared.stream.clone();
    let writer = go(move || {
        let mut writes = WebSocket::from_raw_socket(shared, Role::Server, None);
        for message in rx.iter() {
            if writes.send(message).is_err() {
                break;
            }
        }
    });
    room.say(id, "has joined");
    let ended = loop {
        match reads.read() {
            Ok(Message::Text(text)) => room.say(id, &text),
            Ok(_) => {}
            Err(e) => break e,
        }
    };
    room.0.lock().remove(&id);
    room.say(id, "has left");
    let _ = stream.close();
    let _ = writer.join();
    Err(ended)
}

#[trefoil::main]
fn main() -> io::Result<()> {
    let addr = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:9001".into());
    let listener = TcpListener::bind(addr)?;
    println!("listening on {}", listener.local_addr()?);
    let room = Room::default();
    for id in 1.. {
        match listener.accept() {
            Ok((stream, _)) => {
                let room = room.clone();
                go(move || serve(id, stream, &room));
            }
            Err(_) => trefoil::time::sleep(Duration::from_millis(5)),
        }
    }
    Ok(())
}
