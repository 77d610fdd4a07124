//! Values out of bytes.

/// Reads values off the front of some bytes. Past the end everything is zero, so that every input means something and
/// a shorter input means something simpler.
#[derive(Clone, Debug)]
pub struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    /// A reader of these bytes.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let (head, tail) = self.0.split_at(N.min(self.0.len()));
        out[..head.len()].copy_from_slice(head);
        self.0 = tail;
        out
    }

    /// One byte.
    pub fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.take())
    }

    /// Two bytes, the lowest first.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    /// Four bytes, the lowest first.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    /// Eight bytes, the lowest first.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    /// A number below `n`, from one byte.
    pub fn below(&mut self, n: u8) -> u8 {
        self.u8() % n.max(1)
    }

    /// The lowest bit of one byte.
    pub fn flag(&mut self) -> bool {
        self.below(2) == 1
    }

    /// At most `most` values: one byte for their number, then the values, as long as there are bytes.
    pub fn list<T>(&mut self, most: u8, mut item: impl FnMut(&mut Self) -> T) -> Vec<T> {
        let count = self.below(most.saturating_add(1));
        let mut list = Vec::new();
        for _ in 0..count {
            if self.0.is_empty() {
                break;
            }
            list.push(item(self));
        }
        list
    }

    /// What has not been read.
    #[must_use]
    pub const fn rest(&self) -> &'a [u8] {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_meaning_of_an_input_does_not_change() {
        let input: Vec<u8> = (1..=20).collect();
        let mut bytes = Bytes::new(&input);
        assert_eq!((bytes.u8(), bytes.u16(), bytes.u32()), (1, 0x0302, 0x0706_0504));
        assert_eq!((bytes.u64(), bytes.below(10), bytes.flag()), (0x0F0E_0D0C_0B0A_0908, 6, true));
        assert_eq!(bytes.rest(), [18, 19, 20]);
        assert_eq!(bytes.list(4, Bytes::u8), [19, 20], "18 is 3 modulo 5, and there are two");
        assert_eq!((bytes.u32(), bytes.flag(), bytes.list(9, Bytes::u8).len()), (0, false, 0));
    }
}
