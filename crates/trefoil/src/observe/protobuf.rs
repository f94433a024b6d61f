//! The encoding of protocol buffers, for profiles and traces.

/// A protocol buffer message: its encoded fields.
#[derive(Default)]
pub(super) struct Message(pub(super) Vec<u8>);

impl Message {
    /// Appends seven bits per byte, the lowest first. The eighth bit is set if more bytes follow.
    pub(super) fn varint(mut self, mut n: u64) -> Message {
        while n >= 0x80 {
            self.0.push(n as u8 | 0x80);
            n >>= 7;
        }
        self.0.push(n as u8);
        self
    }

    /// Appends a number.
    pub(super) fn number(self, field: u64, n: u64) -> Message {
        self.varint(field << 3).varint(n)
    }

    /// Appends a number of eight bytes.
    pub(super) fn fixed(self, field: u64, n: u64) -> Message {
        let mut message = self.varint(field << 3 | 1);
        message.0.extend_from_slice(&n.to_le_bytes());
        message
    }

    /// Appends a string or an encoded message.
    pub(super) fn bytes(self, field: u64, bytes: &[u8]) -> Message {
        let mut message = self.varint(field << 3 | 2).varint(bytes.len() as u64);
        message.0.extend_from_slice(bytes);
        message
    }

    pub(super) fn message(self, field: u64, inner: Message) -> Message {
        self.bytes(field, &inner.0)
    }

    /// Appends a repeated number, packed.
    pub(super) fn numbers(self, field: u64, all: impl IntoIterator<Item = u64>) -> Message {
        self.message(field, all.into_iter().fold(Message::default(), Message::varint))
    }
}
