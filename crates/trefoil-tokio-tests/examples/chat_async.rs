//! A chat over WebSockets on async crates (tokio-tungstenite): a client's message is sent to all
//! clients.
//!
//! ```sh
//! cargo run --release -p trefoil-tokio-tests --example chat_async 127.0.0.1:9001
//! ```
//! Each client is one task of tokio's. The example `chat_websocket` of trefoil-compat is the same
//! chat with goroutines.

use futures::{SinkExt, StreamExt};
use std::io;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{Receiver, Sender};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::{Error, Message, Utf8Bytes};

/// Messages that may wait for a client. A client that is slower misses the oldest of them.
const MAX_WAITING: usize = 256;

/// Sends a line to every client, in the name of the client `id`.
fn say(room: &Sender<Utf8Bytes>, id: u64, text: &str) {
    // Fails only if there is no client.
    let _ = room.send(format!("{id}: {text}").into());
}

/// Serves a client until it leaves.
async fn serve(id: u64, stream: TcpStream, room: Sender<Utf8Bytes>) {
    if let Ok(client) = tokio_tungstenite::accept_async(stream).await {
        let messages = room.subscribe();
        say(&room, id, "has joined");
        if let Err(e) = copy(id, client, &room, messages).await {
            eprintln!("client {id}: {e}");
        }
        say(&room, id, "has left");
    }
}

/// Copies what the client sends to the room, and the room's messages to the client.
async fn copy(
    id: u64,
    mut client: WebSocketStream<TcpStream>,
    room: &Sender<Utf8Bytes>,
    mut messages: Receiver<Utf8Bytes>,
) -> Result<(), Error> {
    loop {
        tokio::select! {
            received = client.next() => match received.transpose()? {
                Some(Message::Text(text)) => say(room, id, &text),
                Some(_) => {} // tokio-tungstenite answers pings.
                None => return Ok(()),
            },
            message = messages.recv() => match message {
                Ok(text) => client.send(Message::Text(text)).await?,
                Err(RecvError::Lagged(missed)) => {
                    client.send(Message::text(format!("{missed} messages missed"))).await?;
                }
                Err(RecvError::Closed) => return Ok(()),
            },
        }
    }
}

#[trefoil::main(tokio)]
async fn main() -> io::Result<()> {
    let addr = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:9001".into());
    let listener = TcpListener::bind(addr).await?;
    println!("listening on {}", listener.local_addr()?);
    let room = Sender::new(MAX_WAITING);
    for id in 1.. {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(serve(id, stream, room.clone()));
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
    Ok(())
}
