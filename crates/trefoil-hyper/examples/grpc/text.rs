//! A codec whose messages are UTF-8 text. tonic's code generator would use one for protocol
//! buffers.

use bytes::{Buf, BufMut};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// See the head of the file.
#[derive(Default)]
pub(crate) struct Text;

#[rustfmt::skip]
impl Codec for Text {
    type Encode = String;
    type Decode = String;
    type Encoder = Text;
    type Decoder = Text;
    fn encoder(&mut self) -> Text { Text }
    fn decoder(&mut self) -> Text { Text }
}

impl Encoder for Text {
    type Item = String;
    type Error = Status;
    fn encode(&mut self, text: String, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(text.as_bytes());
        Ok(())
    }
}

impl Decoder for Text {
    type Item = String;
    type Error = Status;
    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<String>, Status> {
        let bytes = buffer.copy_to_bytes(buffer.remaining());
        let text = String::from_utf8(bytes.into()).map_err(|e| Status::internal(e.to_string()))?;
        Ok(Some(text))
    }
}
